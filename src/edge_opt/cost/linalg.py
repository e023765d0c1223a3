"""Linear algebra: factorizations, solutions and eigenvalues by the textbook's count of operations.

They are counted in `other_ops`, not in `macs`: a MAC belongs to a plain product. GVL is Golub and Van Loan, Matrix
Computations, 4th edition; LAWN 41 is LAPACK Working Note 41, appendix on operation counts. Where an algorithm
iterates, the textbook's typical count is used. A complex matrix counts four times a real one (LAWN 41).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, prod
from typing import Any

from edge_opt.cost.rules import Rule, Work, aten, cost_rule, is_complex
from edge_opt.records.costs import TensorInfo

_COMPLEX = 4


def _batch(x: TensorInfo) -> int:
    return prod(x.shape[:-2])


def _columns(right: TensorInfo, matrix: TensorInfo) -> int:
    """Return the number of right-hand sides; a vector has one."""
    return right.shape[-1] if len(right.shape) >= len(matrix.shape) else 1


def _work(x: TensorInfo, batch: int, ops: int | Fraction) -> Work:
    return Work(other_ops=ceil(batch * ops * (_COMPLEX if is_complex(x) else 1)))


def lu_ops(m: int, n: int) -> Fraction:
    """Gaussian elimination with partial pivoting: 2n³/3 for a square matrix (GVL 3.2, LAWN 41 xGETRF)."""
    k = min(m, n)
    return 2 * (Fraction(m * n * k) - Fraction((m + n) * k * k, 2) + Fraction(k**3, 3))


def triangular_ops(n: int, columns: int) -> int:
    """n² for each right-hand side (GVL 3.1)."""
    return n * n * columns


def qr_ops(m: int, n: int) -> Fraction:
    """Householder QR without forming Q: 2n²(m - n/3) where m >= n (GVL 5.2.1); with the sizes exchanged where not."""
    m, n = max(m, n), min(m, n)
    return 2 * n * n * (m - Fraction(n, 3))


def form_q_ops(m: int, n: int, reflectors: int) -> Fraction:
    """The m x n matrix Q from its reflectors: 4mnk - 2(m + n)k² + 4k³/3 (LAWN 41 xORGQR)."""
    k = reflectors
    return 4 * m * n * k - 2 * (m + n) * k * k + Fraction(4 * k**3, 3)


def svd_ops(m: int, n: int, with_vectors: bool, is_full: bool = False) -> Fraction:
    """Golub-Reinsch (GVL 8.6, table of SVD work), with m >= n.

    Values alone 4mn² - 4n³/3; with thin U and V 14mn² + 8n³; with all of U 4m²n + 8mn² + 9n³.
    """
    m, n = max(m, n), min(m, n)
    if not with_vectors:
        return 4 * m * n * n - Fraction(4 * n**3, 3)
    if is_full:
        return Fraction(4 * m * m * n + 8 * m * n * n + 9 * n**3)
    return Fraction(14 * m * n * n + 8 * n**3)


def _matrix_rule(ops: Callable[[int, int], int | Fraction]) -> Rule:
    """Return a rule: the operations of an m x n matrix, for each matrix of a batch."""
    return lambda out, x, *_, **__: _work(x, _batch(x), ops(*x.shape[-2:]))


for _operators, _ops in (
    ((aten.linalg_lu_factor_ex, aten.linalg_lu, aten._lu_with_info), lu_ops),
    # LU, then the product of its diagonal.
    ((aten._linalg_det, aten._linalg_slogdet), lambda m, n: lu_ops(n, n) + n),
    # LU, and 4n³/3 for the inverse (LAWN 41 xGETRF, xGETRI).
    ((aten.linalg_inv_ex,), lambda m, n: 2 * n**3),
    # Also for LDLᵀ (GVL 4.2, 4.4).
    ((aten.linalg_cholesky_ex, aten.cholesky, aten.linalg_ldl_factor_ex), lambda m, n: Fraction(n**3, 3)),
    # LAWN 41 xPOTRI.
    ((aten.cholesky_inverse,), lambda m, n: Fraction(2 * n**3, 3)),
    # Q is left as reflectors.
    ((aten.geqrf,), qr_ops),
    ((aten.linalg_svdvals,), lambda m, n: svd_ops(m, n, with_vectors=False)),
    # The symmetric QR algorithm without vectors (GVL 8.3).
    ((aten.linalg_eigvalsh,), lambda m, n: Fraction(4 * n**3, 3)),
    # The QR algorithm with vectors, and without (GVL 7.5).
    ((aten.linalg_eig,), lambda m, n: 25 * n**3),
    ((aten.linalg_eigvals, aten._linalg_eigvals), lambda m, n: 10 * n**3),
):
    cost_rule(*_operators, kind="linalg")(_matrix_rule(_ops))


@cost_rule(aten._linalg_solve_ex, kind="linalg")
def solve(out: Any, x: TensorInfo, right: TensorInfo, *_: Any, **__: Any) -> Work:
    """An LU factorization, then two triangular solutions for each right-hand side: 2n³/3 + 2n²r."""
    n = x.shape[-1]
    return _work(x, _batch(x), lu_ops(n, n) + 2 * triangular_ops(n, _columns(right, x)))


@cost_rule(aten.linalg_lu_solve, aten.linalg_ldl_solve, kind="linalg")
def solve_factored(out: TensorInfo, factors: TensorInfo, pivots: Any, right: TensorInfo, *_: Any, **__: Any) -> Work:
    """Two triangular solutions for each right-hand side."""
    return _work(factors, _batch(out), 2 * triangular_ops(factors.shape[-1], _columns(right, factors)))


@cost_rule(aten.lu_solve, aten.cholesky_solve, kind="linalg")
def solve_factored_older(out: TensorInfo, right: TensorInfo, factors: TensorInfo, *_: Any, **__: Any) -> Work:
    """Two triangular solutions for each right-hand side."""
    return _work(factors, _batch(out), 2 * triangular_ops(factors.shape[-1], right.shape[-1]))


@cost_rule(aten.linalg_solve_triangular, kind="linalg")
def solve_triangular(out: TensorInfo, x: TensorInfo, right: TensorInfo, *_: Any, **__: Any) -> Work:
    """n² for each right-hand side, which are rows where the matrix stands on the right."""
    return _work(x, 1, out.elements * x.shape[-1])


cost_rule(aten.triangular_solve, kind="linalg")(lambda out, right, x, *_, **__: solve_triangular(out[0], x, right))


@cost_rule(aten.linalg_qr, kind="linalg")
def qr(out: Any, x: TensorInfo, mode: str = "reduced", **_: Any) -> Work:
    """Householder QR; Q is formed unless only R is asked for."""
    m, n = x.shape[-2:]
    k = min(m, n)
    formed = {"r": Fraction(0), "reduced": form_q_ops(m, k, k), "complete": form_q_ops(m, m, k)}[mode]
    factored = qr_ops(m, n) if m >= n else 2 * m * m * (n - Fraction(m, 3))
    return _work(x, _batch(x), factored + formed)


@cost_rule(aten.linalg_householder_product, aten.orgqr, kind="linalg")
def formed_q(out: Any, x: TensorInfo, tau: TensorInfo, **_: Any) -> Work:
    """Q from its reflectors."""
    m, n = x.shape[-2:]
    return _work(x, _batch(x), form_q_ops(m, n, tau.shape[-1]))


@cost_rule(aten.ormqr, kind="linalg")
def applied_q(
    out: TensorInfo, x: TensorInfo, tau: TensorInfo, other: TensorInfo, left: bool = True, *_: Any, **__: Any
) -> Work:
    """Reflectors applied to an m x n matrix: 4mnk - 2nk² from the left, 4mnk - 2mk² from the right (LAWN 41 xORMQR)."""
    m, n = other.shape[-2:]
    k = tau.shape[-1]
    return _work(x, _batch(other), 4 * m * n * k - 2 * (n if left else m) * k * k)


@cost_rule(aten._linalg_svd, kind="linalg")
def svd(out: Any, x: TensorInfo, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> Work:
    """Golub-Reinsch."""
    m, n = x.shape[-2:]
    return _work(x, _batch(x), svd_ops(m, n, with_vectors=compute_uv, is_full=full_matrices))


@cost_rule(aten.linalg_pinv, kind="linalg")
def pseudo_inverse(out: TensorInfo, x: TensorInfo, *_: Any, **options: Any) -> Work:
    """Singular values with thin U and V (eigenvalues where it is Hermitian), scaled, and the product of the two."""
    m, n = x.shape[-2:]
    k = min(m, n)
    parts = 9 * n**3 if options.get("hermitian") else svd_ops(m, n, with_vectors=True)
    return _work(x, _batch(x), parts + k * n + 2 * m * n * k)


@cost_rule(aten._linalg_eigh, kind="linalg")
def symmetric_eigenvalues(out: Any, x: TensorInfo, uplo: str = "L", compute_v: bool = True, **_: Any) -> Work:
    """The symmetric QR algorithm: 4n³/3, about 9n³ with vectors (GVL 8.3)."""
    n = x.shape[-1]
    return _work(x, _batch(x), 9 * n**3 if compute_v else Fraction(4 * n**3, 3))


@cost_rule(aten.linalg_lstsq, kind="linalg")
def least_squares(out: Any, x: TensorInfo, right: TensorInfo, rcond: Any = None, *_: Any, **options: Any) -> Work:
    """Householder QR, Qᵀb and back substitution: 2n²(m - n/3) + r(4mn - 2n²) + n²r (GVL 5.3).

    With the drivers gelsd and gelss by singular values: thin U and V, then Uᵀb and V times that, 2r(mn + n²).
    """
    m, n = max(x.shape[-2:]), min(x.shape[-2:])
    columns = _columns(right, x)
    if options.get("driver") in ("gelsd", "gelss"):
        return _work(x, _batch(x), svd_ops(m, n, with_vectors=True) + 2 * columns * (m * n + n * n))
    applied = columns * (4 * m * n - 2 * n * n)
    return _work(x, _batch(x), qr_ops(m, n) + applied + triangular_ops(n, columns))


@cost_rule(aten.linalg_matrix_exp, kind="linalg")
def exponential(out: Any, x: TensorInfo) -> Work | None:
    """The number of products follows from the norm of the matrix, which is a value; 1 x 1 is an exponential."""
    return Work(other_ops=x.elements) if x.shape[-1] <= 1 else None
