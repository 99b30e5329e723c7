"""Exponential and logarithm by additions, products and quotients alone."""

from __future__ import annotations

import math
import random
from decimal import Decimal

import pytest

from ds_dynmo.partitioners.portable import exp, log


@pytest.mark.parametrize("seed", range(3))
def test_they_are_right_but_for_the_last_bits(seed: int) -> None:
    chooser = random.Random(seed)
    for _ in range(300):
        value = 10 ** chooser.choice([chooser.uniform(-0.3, 0.3), chooser.uniform(-12, 12), 0.0])
        exact = float(Decimal(value).ln())
        assert abs(log(value) - exact) <= 4 * math.ulp(exact)
        power = chooser.choice([chooser.uniform(-1, 1), chooser.uniform(-40, 40), 0.0])
        exact = float(Decimal(power).exp())
        assert abs(exp(power) - exact) <= 4 * math.ulp(exact)
