def wrap(text, width):
    words, lines = text.split(), []
    while words:
        line = ""
        while words and len(line) + len(words[0]) + bool(line) <= width:
            line += " " * bool(line) + words.pop(0)
        lines.append(line)
    return lines
