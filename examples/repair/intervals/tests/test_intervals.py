import unittest

from intervals import merge


class Merge(unittest.TestCase):
    def test_apart(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_touching(self):
        self.assertEqual(merge([(2, 3), (1, 2), (3, 9), (4, 5)]), [(1, 9)])
