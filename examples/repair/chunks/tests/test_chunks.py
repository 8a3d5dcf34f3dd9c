import unittest

from chunks import chunks


class Chunks(unittest.TestCase):
    def test_the_rest(self):
        self.assertEqual(chunks([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]])

    def test_whole(self):
        self.assertEqual(chunks([1, 2], 1), [[1], [2]])
