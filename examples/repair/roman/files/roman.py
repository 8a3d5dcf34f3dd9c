SYMBOLS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]


def to_roman(number):
    out = ""
    for value, symbol in SYMBOLS:
        out += symbol * (number // value)
        number %= value
    return out
