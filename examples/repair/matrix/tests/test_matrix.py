import unittest

from matrix import transpose


class Transpose(unittest.TestCase):
    def test_argument_is_unchanged(self):
        matrix = [[1, 2], [3, 4]]
        self.assertEqual((transpose(matrix), matrix), ([[1, 3], [2, 4]], [[1, 2], [3, 4]]))

    def test_other_shapes(self):
        self.assertEqual(transpose([[1, 2, 3]]), [[1], [2], [3]])
