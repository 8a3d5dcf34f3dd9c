import unittest

from leap import days


class Days(unittest.TestCase):
    def test_centuries(self):
        self.assertEqual([days(year, 2) for year in (1900, 2000, 2023, 2024, 2100)], [28, 29, 28, 29, 28])

    def test_other_months(self):
        self.assertEqual(sum(days(2023, month) for month in range(1, 13)), 365)
