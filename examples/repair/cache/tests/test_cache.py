import unittest

from cache import Cache


class Recency(unittest.TestCase):
    def setUp(self):
        self.cache = Cache(2)
        self.cache.put("a", 1)
        self.cache.put("b", 2)

    def test_a_read_entry_stays(self):
        self.cache.get("a")
        self.cache.put("c", 3)
        self.assertEqual([self.cache.get(key) for key in "abc"], [1, None, 3])

    def test_a_written_entry_stays(self):
        self.cache.put("a", 4)
        self.cache.put("c", 3)
        self.assertEqual([self.cache.get(key) for key in "abc"], [4, None, 3])
