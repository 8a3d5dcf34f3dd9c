import unittest

from wrap import wrap


class Wrap(unittest.TestCase):
    def test_short_words(self):
        self.assertEqual(wrap("a bb ccc d", 4), ["a bb", "ccc", "d"])

    def test_a_long_word(self):
        self.assertEqual(wrap("a seventeen b", 4), ["a", "seventeen", "b"])
