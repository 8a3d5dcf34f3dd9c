import unittest

from query import parse


class Parse(unittest.TestCase):
    def test_several(self):
        self.assertEqual(parse("a=1&b=2&a=3"), {"a": ["1", "3"], "b": ["2"]})

    def test_nothing(self):
        self.assertEqual(parse(""), {})
