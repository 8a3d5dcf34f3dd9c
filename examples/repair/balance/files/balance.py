def balanced(text):
    depth = 0
    for each in text:
        if each in "([{":
            depth += 1
        elif each in ")]}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0
