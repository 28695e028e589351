"""Small numerics without dependencies: the exact optimum equation, maximum search, incomplete gamma functions."""

from __future__ import annotations

import math
from collections.abc import Callable

_SERIES_BELOW = 0.05
_GOLD = 0.3819660112501051


def optimal_work_s(mtbf_s: float, save_s: float) -> float:
    """Work between saves that maximises goodput when failures are exponential and strike during saves too.

    τ = M·(1 + W₀(−e^(−1−δ/M))), the exact optimum of Young's (1974) and Daly's (2006) problem: √(2δM) and Daly's
    higher-order rule are its first one and three terms. Valid for every δ > 0, M > 0; relative error below 1e-12.
    Always below M; dead time, recovery and persist latency do not move it.
    """
    return mtbf_s * _solve(save_s / mtbf_s)


def optimal_work_safe_save_s(mtbf_s: float, save_s: float, turn_s: float) -> float:
    """The optimum when failures cannot strike during the save; ``turn_s`` = MTBF + mean time from failure to work.

    τ = M·(1 + W₀((δ/Q − 1)/e)) with Q = ``turn_s``; here recovery does move the optimum, and τ > M once δ > Q.
    """
    ratio = save_s / turn_s
    if ratio < 1:
        return mtbf_s * _solve(max(-math.log1p(-ratio), 1e-300))
    target = (ratio - 1) / math.e
    v = math.log1p(target)  # solve v·e^v = target, v >= 0
    for _ in range(50):
        step = (v - target * math.exp(-v)) / (1 + v)
        v -= step
        if abs(step) <= 1e-16 * (1 + v):
            break
    return mtbf_s * (1 + v)


def _solve(eps: float) -> float:
    """x in (0, 1] with −log(1−x) − x = eps."""
    if eps > 1:  # y = 1 - x is small: y = exp(y - 1 - eps) contracts by y
        y = math.exp(-1 - eps)
        for _ in range(40):
            y, before = math.exp(y - 1 - eps), y
            if y == before:
                break
        return 1 - y
    root = math.sqrt(2 * eps)
    x = min(root - 2 * eps / 3 + root * eps / 18, 0.9) if eps > 1e-12 else root - 2 * eps / 3
    for _ in range(12):
        step = (_excess(x) - eps) * (1 - x) / x
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x


def _excess(x: float) -> float:
    """−log(1−x) − x without cancellation near 0."""
    if x > _SERIES_BELOW:
        return -math.log1p(-x) - x
    total, power = 0.0, x
    for n in range(2, 17):
        power *= x
        total += power / n
    return total


def maximise(f: Callable[[float], float], low: float, high: float, *, tol: float = 1e-9) -> float:
    """Where ``f``, unimodal over log x, is largest on [low, high] (Brent 1973, golden section with parabolas)."""
    a, b = math.log(low), math.log(high)
    x = w = v = a + _GOLD * (b - a)
    fx = fw = fv = f(math.exp(x))
    d = e = 0.0
    for _ in range(200):
        middle, close = 0.5 * (a + b), tol * (abs(x) + 1e-3)
        if abs(x - middle) <= 2 * close - 0.5 * (b - a):
            break
        parabola = False
        if abs(e) > close:
            r, q = (x - w) * (fx - fv), (x - v) * (fx - fw)
            p, q = (x - v) * q - (x - w) * r, 2 * (q - r)
            p, q = (-p, q) if q > 0 else (p, -q)
            e, before = d, e
            if abs(p) < abs(0.5 * q * before) and q * (a - x) < p < q * (b - x):
                d, parabola = p / q, True
        if not parabola:
            e = (a if x >= middle else b) - x
            d = _GOLD * e
        u = x + (d if abs(d) >= close else math.copysign(close, d))
        fu = f(math.exp(u))
        if fu >= fx:
            a, b = (x, b) if u >= x else (a, x)
            v, fv, w, fw, x, fx = w, fw, x, fx, u, fu
        else:
            a, b = (u, b) if u < x else (a, u)
            if fu >= fw or w == x:
                v, fv, w, fw = w, fw, u, fu
            elif fu >= fv or v in (x, w):
                v, fv = u, fu
    return math.exp(x)


def highest(f: Callable[[float], float], low: float, high: float, *, scan: int = 24) -> float:
    """As :func:`maximise` where ``f`` may have more than one hump: the best of a log grid, then its surroundings."""
    ratio = (high / low) ** (1 / scan)
    at = max(range(scan + 1), key=lambda i: f(low * ratio**i))
    return maximise(f, low * ratio ** max(at - 1, 0), low * ratio ** min(at + 1, scan))


def best_count(f: Callable[[int], float], start: int, low: int, high: float) -> int:
    """The whole number in [low, high] where ``f``, unimodal, is largest: uphill from ``start`` in strides that double
    while they help and halve when they do not, so a start that is far off costs a logarithm."""
    at, best = start, f(start)
    for direction in (-1, 1):
        stride = 1
        while stride:
            there = at + direction * stride
            if low <= there <= high and (value := f(there)) > best:
                at, best, stride = there, value, stride * 2
            else:
                stride //= 2
    return at


def crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """The x in [low, high] where ``f`` falls through zero; the end itself if it does not. Over log x, by inverse
    quadratic interpolation where that is safe and bisection elsewhere (Chandrupatla 1997)."""
    if (fa := f(low)) <= 0:
        return low
    if (fb := f(high)) >= 0:
        return high
    a, b, t = math.log(low), math.log(high), 0.5
    for _ in range(200):
        x = a + t * (b - a)
        fx = f(math.exp(x))
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        best, least = (a, fa) if abs(fa) < abs(fb) else (b, fb)
        near = 5e-14 * max(1.0, abs(best)) / abs(b - a)
        if near > 0.5 or least == 0:
            return math.exp(best)
        along, fell = (a - b) / (c - b), (fa - fb) / (fc - fb)
        t = 0.5
        if fell * fell < along and (1 - fell) * (1 - fell) < 1 - along:  # a power would raise when too large
            t = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = min(1 - near, max(near, t))
    return math.exp(0.5 * (a + b))


def gamma_cdf(shape: float, x: float) -> float:
    """Regularised lower incomplete gamma P(shape, x): series below shape + 1, continued fraction above (Lentz)."""
    if x <= 0:
        return 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        k = shape
        while term > total * 1e-17:
            k += 1
            term *= x / k
            total += term
        return front * total
    return 1 - front * _upper_fraction(shape, x)


def upper_gamma(shape: float, x: float) -> float:
    """Upper incomplete gamma Γ(shape, x), not regularised, for x >= 0."""
    if x < shape + 1:
        return math.gamma(shape) * (1 - gamma_cdf(shape, x))
    return math.exp(shape * math.log(x) - x) * _upper_fraction(shape, x)


def _upper_fraction(shape: float, x: float) -> float:
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    h = d
    for n in range(1, 10_000):
        an = -n * (n - shape)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return h


def gamma_quantile(shape: float, p: float) -> float:
    """The x with P(shape, x) = p; Newton in log x from Wilson and Hilferty's (1931) start."""
    z = _normal_quantile(p)
    start = shape * (1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3
    if shape > 1e7:
        return start  # closer than the digits that the series would have left
    small = math.exp((math.log(p) + math.lgamma(shape + 1)) / shape)
    u = math.log(start if start > small and shape > 0.6 else small)
    for _ in range(60):
        x = math.exp(u)
        density = math.exp(shape * u - x - math.lgamma(shape))
        step = (gamma_cdf(shape, x) - p) / density if density > 0 else 1.0
        step = max(-2.0, min(2.0, step))
        u -= step
        if abs(step) < 1e-13:
            break
    return math.exp(u)


def _normal_quantile(p: float) -> float:
    """Standard normal quantile by Newton on erfc; p in (0, 1)."""
    z = 0.0
    for _ in range(100):
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        step = (0.5 * math.erfc(-z / math.sqrt(2)) - p) / density
        step = max(-1.0, min(1.0, step))
        z -= step
        if abs(step) < 1e-12:
            break
    return z
