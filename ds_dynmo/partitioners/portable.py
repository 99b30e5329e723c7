"""Exponential and logarithm that are the same to the bit on every machine.

Every rank decides from the same numbers, so the last bit must not depend on its processor. Addition, multiplication,
division and square root are exact to the last bit by IEEE 754. The functions of C and numpy, and matrix products and
solvers, are not: they choose among algorithms by processor.
"""

from __future__ import annotations

import math

__all__ = ["exp", "log"]

_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # ln 2; the first ends in zeros
_LN2 = _LN2_HIGH + _LN2_LOW
_ODD = [1.0 / number for number in range(23, 0, -2)]  # of the series of atanh
_FACTORIALS = [1.0 / math.factorial(number) for number in range(17, -1, -1)]
_ROOT_OF_HALF = math.sqrt(0.5)


def log(value: float) -> float:
    """Return the natural logarithm of a positive number, but for the last two bits.

    >>> log(1.0), log(8.0) == 3 * log(2.0), round(log(10.0), 14)
    (0.0, True, 2.30258509299405)
    """
    mantissa, exponent = math.frexp(value)
    if mantissa < _ROOT_OF_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = ratio * ratio, 0.0
    for coefficient in _ODD:
        series = series * square + coefficient
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * ratio * series)


def exp(value: float) -> float:
    """Return e to the power of a number, but for the last two bits.

    >>> exp(0.0), round(exp(1.0), 14), round(exp(-20.0) * 1e9, 12)
    (1.0, 2.71828182845905, 2.061153622439)
    """
    exponent = round(value / _LN2)
    rest = (value - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    series = 0.0
    for coefficient in _FACTORIALS:
        series = series * rest + coefficient
    return math.ldexp(series, exponent)
