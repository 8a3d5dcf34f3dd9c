class Cache:
    def __init__(self, size):
        self.size, self.entries = size, {}

    def get(self, key):
        return self.entries.get(key)

    def put(self, key, value):
        if key not in self.entries and len(self.entries) == self.size:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = value
