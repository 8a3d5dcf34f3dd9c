import unittest

from balance import balanced


class Balanced(unittest.TestCase):
    def test_right(self):
        self.assertTrue(balanced("a(b[c]{d})") and balanced(""))

    def test_wrong(self):
        self.assertEqual([balanced(text) for text in ("(]", "([)]", ")(", "(")], [False] * 4)
