import unittest

from roman import to_roman


class Roman(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(to_roman(1666), "MDCLXVI")

    def test_subtracted(self):
        self.assertEqual([to_roman(n) for n in (4, 9, 44, 1994)], ["IV", "IX", "XLIV", "MCMXCIV"])
