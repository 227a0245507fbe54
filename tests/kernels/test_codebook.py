"""Lloyd-Max codebooks of the sphere law: the exact table, the fixed point, and the two-load quantizer."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvlab.kernels.codebook import grid, lloyd_max, quantize

GAUSS = 10**7  # the law at this d is N(0, 1/d) to more digits than the table has
CENTROIDS = {
    (32, 1): "0.142153",
    (32, 2): "0.079802 0.263319",
    (32, 3): "0.042852 0.131756 0.232461 0.366268",
    (32, 4): "0.022329 0.067424 0.113896 0.162919 0.216190 0.276564 0.349925 0.453428",
    (64, 1): "0.100126",
    (64, 2): "0.056515 0.187497",
    (64, 3): "0.030469 0.093832 0.166168 0.263914",
    (64, 4): "0.015919 0.048090 0.081312 0.116487 0.154926 0.198856 0.252914 0.330796",
    (96, 1): "0.081646",
    (96, 2): "0.046167 0.153446",
    (96, 3): "0.024924 0.076795 0.136169 0.216853",
    (96, 4): "0.013033 0.039378 0.066603 0.095465 0.127064 0.163281 0.208037 0.272971",
    (128, 1): "0.070662",
    (128, 2): "0.039992 0.133042",
    (128, 3): "0.021604 0.066586 0.118140 0.188397",
    (128, 4): "0.011302 0.034152 0.057772 0.082828 0.110288 0.141805 0.180836 0.237664",
    (256, 1): "0.049917",
    (256, 2): "0.028289 0.094238",
    (256, 3): "0.015297 0.047167 0.083765 0.133854",
    (256, 4): "0.008008 0.024201 0.040949 0.058732 0.078249 0.100698 0.128588 0.169410",
    (GAUSS, 1): "0.797885",
    (GAUSS, 2): "0.452780 1.510418",
    (GAUSS, 3): "0.245094 0.756005 1.343909 2.151946",
    (GAUSS, 4): "0.128395 0.388048 0.656759 0.942340 1.256231 1.618046 2.069017 2.732590",
}
EDGES = {
    (64, 3): "0.062151 0.130000 0.215041",
    (64, 4): "0.032004 0.064701 0.098899 0.135706 0.176891 0.225885 0.291855",
    (128, 4): "0.022727 0.045962 0.070300 0.096558 0.126047 0.161321 0.209250",
    (GAUSS, 4): "0.258222 0.522404 0.799550 1.099286 1.437139 1.843532 2.400803",
}
MSE = {
    16: (0.343185, 0.105847, 0.030084, 0.008094),
    32: (0.353357, 0.111600, 0.032261, 0.008774),
    48: (0.356715, 0.113547, 0.033011, 0.009011),
    64: (0.358387, 0.114526, 0.033391, 0.009132),
    96: (0.360056, 0.115508, 0.033773, 0.009253),
    128: (0.360889, 0.116000, 0.033966, 0.009315),
    256: (0.362136, 0.116740, 0.034256, 0.009408),
    GAUSS: (0.363380, 0.117482, 0.034548, 0.009501),
}
MSE_HIGH = {  # bits 5 to 8
    64: (0.002399, 0.000616, 0.000156, 0.0000393),
    128: (0.002451, 0.000630, 0.000160, 0.0000402),
    GAUSS: (0.002505, 0.000644, 0.000163, 0.0000412),
}
ENTROPY = {(32, 4): 3.7994, (64, 2): 1.9179, (64, 4): 3.7825, (128, 3): 2.8314, (256, 4): 3.7696, (GAUSS, 4): 3.7653}


def unit(d):
    return math.sqrt(d) if d == GAUSS else 1.0


@pytest.mark.parametrize(("d", "bits"), CENTROIDS)
def test_centroids_to_the_digit(d, bits):
    want = torch.tensor([float(v) for v in CENTROIDS[d, bits].split()], dtype=torch.float64)
    got = lloyd_max(d, bits).centroids * unit(d)
    assert torch.equal(got, -got.flip(0)), "symmetric to the last bit"
    torch.testing.assert_close(got[2 ** (bits - 1) :], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("d", "bits"), EDGES)
def test_edges_to_the_digit(d, bits):
    want = torch.tensor([0.0] + [float(v) for v in EDGES[d, bits].split()], dtype=torch.float64)
    torch.testing.assert_close(lloyd_max(d, bits).edges[2 ** (bits - 1) - 1 :] * unit(d), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("d", MSE)
def test_mse_to_the_digit(d):
    """Fails for the paper's 0.03 and 0.009 (truncations), and for a table of equal-probability cells (0.0195)."""
    assert [round(lloyd_max(d, b).mse, 6) for b in (1, 2, 3, 4)] == pytest.approx(MSE[d], abs=1.01e-6)


@pytest.mark.parametrize("d", MSE_HIGH)
def test_mse_of_many_bits(d):
    for bits, want in zip(range(5, 9), MSE_HIGH[d]):
        assert lloyd_max(d, bits).mse == pytest.approx(want, abs=6e-7 if bits < 8 else 6e-8)


@pytest.mark.parametrize(("d", "bits"), ENTROPY)
def test_entropy_of_the_codes(d, bits):
    """Ties the cells' masses to the law: by quadrature, independent of the closed forms."""
    if d == GAUSS:
        density, lo, hi = (lambda t: np.exp(-t * t / 2) / math.sqrt(2 * math.pi)), -9.0, 9.0
    else:
        c = math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)
        density, lo, hi = (lambda t: c * (1 - t * t) ** ((d - 3) / 2)), -1.0, 1.0
    edges = np.concatenate([[lo], lloyd_max(d, bits).edges.numpy() * unit(d), [hi]])
    nodes, weights = np.polynomial.legendre.leggauss(80)
    mass = [np.sum(weights * density((b - a) / 2 * nodes + (a + b) / 2)) * (b - a) / 2 for a, b in pairwise(edges)]
    assert sum(mass) == pytest.approx(1, abs=1e-9)
    assert -sum(m * math.log2(m) for m in mass) == pytest.approx(ENTROPY[d, bits], abs=1e-4)


def test_one_conditional_mean_step_is_not_the_optimum():
    """A known wrong table (quantile cells, never iterated) ends at 0.1739 for d=128, 4 bits, and doubles the mse."""
    assert lloyd_max(128, 4).centroids[-1] > 0.23


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("d", [3, 20, 64, 128])
def test_two_loads_find_the_cell_of_a_binary_search(d, bits):
    """On every edge, one float32 step to each side, and outside [-1, 1]. A tie takes the upper cell."""
    edges = lloyd_max(d, bits).edges.float()
    g = torch.Generator().manual_seed(bits)
    up, down = torch.full_like(edges, 2), torch.full_like(edges, -2)
    near = [edges, torch.nextafter(edges, up), torch.nextafter(edges, down)]
    z = torch.cat(
        [*near, torch.randn(20000, generator=g) / d**0.5, torch.tensor([-1.0, 1.0, 1.0000001, -1.5, 0.0, -0.0])]
    )
    half, base, own = grid(d, bits)
    assert torch.equal(quantize(z, half, base, own).long(), torch.searchsorted(edges, z, right=True))


@pytest.mark.parametrize(("d", "bits"), [(2, 4), (64, 0), (64, 9)])
def test_what_has_no_codebook_is_refused(d, bits):
    with pytest.raises(ValueError, match="codebook needs"):
        lloyd_max(d, bits)
