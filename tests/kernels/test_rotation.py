"""Rotations: orthogonal, really Haar, reproducible, and applied the same way whatever comes along in the batch."""

import math

import pytest
import torch

from kvlab.kernels import codebook, rotation


def gen(i=0, role="k", purpose="pi", layer=0, head=-1):
    return rotation.generator(i, layer, head, role, purpose)


@pytest.mark.parametrize("d", [3, 64, 80, 128])
@pytest.mark.parametrize("kind", ["haar", "rht", "identity"])
def test_rotations_are_orthogonal(kind, d):
    if kind == "rht" and d & (d - 1):
        with pytest.raises(ValueError, match="power of two"):
            rotation.rotation(kind, d, gen())
        return
    m = rotation.rotation(kind, d, gen())
    torch.testing.assert_close(m @ m.mT, torch.eye(d), rtol=0, atol=2e-6)


def test_a_matrix_depends_on_every_part_of_its_key():
    """Fails when keys and values, or rotation and sketch, share a stream of random numbers."""
    keys = [gen(), gen(1), gen(role="v"), gen(purpose="s"), gen(layer=1), gen(head=0), gen(head=1)]
    first = [torch.randn(4, generator=g).tolist() for g in keys]
    assert len({tuple(f) for f in first}) == len(keys)
    assert torch.equal(rotation.haar(8, gen(5)), rotation.haar(8, gen(5)))


def test_haar_has_the_sign_fix():
    """Fails for the Q of LAPACK as it is: its first column points away from the Gaussian one, so Q[0, 0] < 0 always.

    400 fair signs: a sum beyond 100 happens once in 2 million.
    """
    corner = torch.tensor([rotation.haar(4, gen(i))[0, 0].item() for i in range(400)])
    assert corner.sign().sum().abs() < 100
    # z_j^2 ~ Beta(1/2, 3/2): mean 1/4, variance 1/16; standard error of the mean 0.0125
    assert abs((corner**2).mean() - 0.25) < 4 * 0.0125


def test_rht_equals_the_butterfly():
    """log2(d) passes of sums and differences, written out."""
    d, rounds = 64, 3
    signs = torch.stack(
        [torch.randint(0, 2, (d, 1), generator=g, dtype=torch.float64) for g in [gen()] for _ in range(3)]
    )
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    for r in range(rounds):
        y, h = y * (signs[r, :, 0] * 2 - 1), 1
        while h < d:
            pairs = y.view(-1, 2, h)
            y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
            h *= 2
        y /= math.sqrt(d)
    torch.testing.assert_close(rotation.rht(d, gen(), rounds) @ x, y, rtol=0, atol=1e-12)


def test_a_constant_vector_does_not_become_a_spike():
    """Fails for a Hadamard matrix without signs: it sends the constant vector to one coordinate."""
    z = rotation.rht(64, gen(), 1) @ torch.full((64,), 1 / 8, dtype=torch.float64)
    assert z.abs().max() < 0.7


def one_hot_mse(d, rounds, bits, draws=250, per_draw=8):
    """Mean of |x - x~|^2 over 2,000 one-hot vectors under random signs, relative to the codebook's."""
    book = codebook.lloyd_max(d, bits)
    columns = torch.linspace(0, d - 1, per_draw).long()
    z = torch.stack([rotation.rht(d, gen(i), rounds)[:, columns] for i in range(draws)])
    cells = torch.searchsorted(book.edges, z.contiguous(), right=True)
    return ((z - book.centroids[cells]) ** 2).sum(1).mean().item() / book.mse


@pytest.mark.parametrize(("d", "rounds"), [(64, 3), (128, 2)])
def test_enough_rounds_make_a_one_hot_vector_ordinary(d, rounds):
    for bits in (1, 2, 3, 4):
        assert one_hot_mse(d, rounds, bits) == pytest.approx(1, abs=0.1), f"{bits} bits"


def test_one_round_is_not_enough():
    """One round sends e_i to +-1/sqrt(d) exactly: at d=128 the error of 2 bits is 0.2552 (2.2 x), above Theorem 1."""
    assert one_hot_mse(128, 1, 2, draws=4) * codebook.lloyd_max(128, 2).mse == pytest.approx(0.2552, abs=1e-4)
    assert one_hot_mse(128, 1, 3, draws=4) * codebook.lloyd_max(128, 3).mse == pytest.approx(0.0608, abs=1e-4)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("sides", [0, 2])
def test_apply_is_a_matrix_times_every_vector(heads, sides):
    D, E, Hk = 16, 24, 3
    g = torch.Generator().manual_seed(0)
    lead = (sides,) * bool(sides)
    x = torch.randn(*lead, 2, Hk, 5, D, generator=g)
    m = torch.randn(*lead, *((Hk,) * heads), E, D, generator=g)
    per = m if heads else m.unsqueeze(-3).expand(*lead, Hk, E, D)
    want = torch.einsum("snhtd,shed->snhte" if sides else "nhtd,hed->nhte", x, per)
    torch.testing.assert_close(rotation.apply(x, m), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_a_row_does_not_depend_on_how_many_rows_come_with_it(D, heads):
    """Fails without padding to MIN_ROWS: BLAS takes a vector path for 1 to 3 rows and rounds differently."""
    g = torch.Generator().manual_seed(0)
    m = torch.stack([rotation.haar(D, gen(i)).float() for i in range(2)]) if heads else rotation.haar(D, gen()).float()
    x = torch.randn(1, 2, 300, D, generator=g)
    whole = rotation.apply(x, m)
    for t in (1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 257):
        assert torch.equal(rotation.apply(x[:, :, :t], m), whole[:, :, :t]), f"{t} tokens"


def test_inverse_undoes_apply():
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    m = rotation.haar(64, gen()).float()
    torch.testing.assert_close(rotation.inverse(rotation.apply(x, m), m), x, rtol=0, atol=1e-5)
