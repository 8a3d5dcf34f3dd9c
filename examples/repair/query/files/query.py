def parse(text):
    found = {}
    for pair in text.split("&"):
        name, _, value = pair.partition("=")
        found[name] = [value]
    return found
