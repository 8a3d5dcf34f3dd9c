"""math-verify's two functions, without its warnings: one for each response that is not read in time, all of it."""

import logging

from math_verify import parse, verify

__all__ = ["parse", "verify"]

logging.getLogger("math_verify").setLevel(logging.ERROR)
