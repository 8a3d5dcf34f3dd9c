def chunks(values, size):
    return [values[start : start + size] for start in range(0, len(values) - size + 1, size)]
