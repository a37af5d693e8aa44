"""The one product: full precision whatever the flags, autocast or the compiler say, and any derivative."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from comhe.products import full_precision, lift, product


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


FLAGS = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn, torch.backends.mkldnn.matmul)


def flags() -> list[str]:
    return [backend.fp32_precision for backend in FLAGS]


@pytest.fixture(autouse=True)
def _flags_as_they_were() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in FLAGS:
        backend.fp32_precision = "none"


def set_medium() -> None:
    torch.set_float32_matmul_precision("medium")


def set_high() -> None:
    torch.set_float32_matmul_precision("high")


def set_old_flag() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def set_own_flags() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_all() -> None:
    torch.backends.fp32_precision = "tf32"


def set_all_of_mkldnn() -> None:
    torch.backends.mkldnn.fp32_precision = "bf16"


def set_nothing() -> None:
    pass


LOWERINGS = [set_medium, set_high, set_old_flag, set_own_flags, set_all, set_all_of_mkldnn, set_nothing]
lowering = pytest.mark.parametrize("lower", LOWERINGS)

# Large enough for the libraries that a flag switches to.
A, B = normal(2, 300, 256), normal(256, 270, seed=1)


def value_and_gradients(a: Tensor, b: Tensor) -> list[Tensor]:
    a, b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    value = product(a, b)
    weights = normal(*value.shape, seed=2, dtype=value.dtype)
    return [value.detach(), *torch.autograd.grad(value, (a, b), weights)]


PLAIN = value_and_gradients(A, B)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def machine_rounds() -> bool:
    """Whether "medium" changes a plain product of this machine's processor."""
    plain = A @ B
    set_medium()
    lowered = A @ B
    torch.set_float32_matmul_precision("highest")
    return not torch.equal(plain, lowered)


def within_rounding(found: Tensor, a: Tensor, b: Tensor) -> bool:
    """The bound of a float32 sum of k products, whatever its order: k 2^-24 sum |a_i b_i|."""
    error = (found.double() - a.double() @ b.double()).abs()
    return bool((error <= a.shape[-1] * 2.0**-24 * (a.double().abs() @ b.double().abs())).all())


# Precision.


@lowering
def test_value_is_that_of_float64(lower: object) -> None:
    lower()
    assert within_rounding(product(A, B), A, B)
    # Lost where operands are rounded to TF32 (10 bits) or bfloat16 (7).
    fine = torch.full((256, 256), 1 + 2.0**-12)
    assert torch.equal(product(fine, torch.eye(256)), fine)
    assert torch.equal(product(torch.eye(256), fine), fine)


@lowering
def test_flags_change_no_bit(lower: object) -> None:
    lower()
    assert same(value_and_gradients(A, B), PLAIN)


def test_medium_changes_a_plain_product_here() -> None:
    """Without this the test above has nothing to hold on this processor; the next one holds on any."""
    if not machine_rounds():
        pytest.skip("this processor has no bfloat16 products")
    set_medium()
    assert not torch.equal(A @ B, PLAIN[0])
    assert torch.equal(product(A, B), PLAIN[0])


@lowering
def test_flags_and_autocast_are_off_inside(lower: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    matmul = torch.matmul

    def watching(a: Tensor, b: Tensor) -> Tensor:
        seen.append((flags()[1], flags()[3], torch.is_autocast_enabled("cpu"), a.dtype, b.dtype))
        return matmul(a, b)

    lower()
    monkeypatch.setattr(torch, "matmul", watching)
    with torch.autocast("cpu", torch.bfloat16):
        value_and_gradients(normal(3, 4), normal(4, 5))
    assert len(seen) == 3  # forward, and a gradient each
    for cuda, mkldnn, autocast, *dtypes in seen:
        assert cuda in ("ieee", "none")
        assert mkldnn in ("ieee", "none")
        assert not autocast
        assert dtypes == [torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        assert (A @ B).dtype == dtype
        assert same(value_and_gradients(A, B), PLAIN)


def test_types() -> None:
    a, b = normal(4, 6), normal(6, 5, seed=1)
    for low in (torch.bfloat16, torch.float16):
        found = value_and_gradients(a.to(low), b.to(low))
        expected = value_and_gradients(a.to(low).float(), b.to(low).float())
        assert [f.dtype for f in found] == [torch.float32, low, low]
        assert same(found, [expected[0], expected[1].to(low), expected[2].to(low)])
        assert product(a.to(low), b).dtype == torch.float32
        assert torch.equal(product(a.to(low), b.double()), a.to(low).double() @ b.double())
    assert torch.equal(product(a.double(), b), a.double() @ b.double())
    assert lift(a) is a
    assert lift(a.double()).dtype == torch.float64


# Flags are put back.


@lowering
def test_flags_are_restored(lower: object) -> None:
    lower()
    before = flags()
    product(A, B)
    assert flags() == before
    with pytest.raises(RuntimeError):
        product(A, A)
    assert flags() == before
    with pytest.raises(ZeroDivisionError), full_precision(A.device):
        raise ZeroDivisionError
    assert flags() == before
    with full_precision(A.device), full_precision(A.device):
        pass
    assert flags() == before


def test_the_old_getters_still_answer() -> None:
    set_medium()
    product(A, B)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision("highest")
    product(A, B)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_flag_that_follows_another_still_does() -> None:
    set_all()
    product(A, B)
    torch.backends.fp32_precision = "ieee"
    assert flags() == ["ieee"] * 4


def test_autocast_is_restored() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        product(A, B)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        with pytest.raises(ZeroDivisionError), full_precision(A.device):
            raise ZeroDivisionError
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_two_threads_share_the_flags() -> None:
    """Devices' backward passes run in threads of their own: one that ends must not restore what another needs."""
    set_own_flags()
    before = flags()
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with full_precision(A.device):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with full_precision(A.device):  # begins second, ends second
        leave.set()
        thread.join(10)
        assert flags()[1] == flags()[3] == "ieee"
    assert flags() == before

    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with full_precision(A.device):  # begins second, ends first
        pass
    assert flags()[1] == flags()[3] == "ieee"
    leave.set()
    thread.join(10)
    assert flags() == before


# Derivatives.

SHAPES = [
    ((3, 4), (4, 2)),
    ((2, 3, 4), (2, 4, 2)),
    ((2, 3, 4), (4, 2)),
    ((3, 4), (5, 4, 2)),
    ((2, 1, 3, 4), (5, 4, 1)),
    ((1, 3, 4), (2, 4, 2)),
    ((1, 1), (1, 1)),
]
every_shape = pytest.mark.parametrize(("left", "right"), SHAPES)


@every_shape
def test_derivatives(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a = normal(*left, dtype=torch.float64).requires_grad_()
    b = normal(*right, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.equal(product(a, b), a @ b)
    assert torch.autograd.gradcheck(product, (a, b))
    assert torch.autograd.gradgradcheck(product, (a, b))


@every_shape
def test_broadcast_gradients_are_those_of_a_plain_product(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = normal(*left, dtype=torch.float64), normal(*right, seed=1, dtype=torch.float64)
    found = value_and_gradients(a, b)
    a, b = a.requires_grad_(), b.requires_grad_()
    value = a @ b
    expected = [value, *torch.autograd.grad(value, (a, b), normal(*value.shape, seed=2, dtype=torch.float64))]
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        torch.testing.assert_close(f, e, rtol=1e-14, atol=1e-14)


def test_a_product_with_itself() -> None:
    a = normal(3, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: product(a, a.mT), a)
    assert torch.autograd.gradgradcheck(lambda a: product(a, a.mT), a)


def test_a_third_derivative() -> None:
    a, b = (normal(2, 2, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))

    def cube(multiply: object) -> Tensor:
        first, *_ = torch.autograd.grad(multiply(a, b).pow(3).sum(), (a, b), create_graph=True)
        _, second = torch.autograd.grad(first.pow(2).sum(), (a, b), create_graph=True)
        third, _ = torch.autograd.grad(second.pow(2).sum(), (a, b))
        return third

    torch.testing.assert_close(cube(product), cube(torch.matmul), rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    matmul = torch.matmul

    def counting(a: Tensor, b: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", counting)
    a, b = normal(3, 4).requires_grad_(), normal(4, 5)
    (gradient,) = torch.autograd.grad(product(a, b).sum(), a)
    assert count == 2
    torch.testing.assert_close(gradient, matmul(torch.ones(3, 5), b.mT))


def test_strides_do_not_matter() -> None:
    a, b = normal(6, 4, 3), normal(5, 4, seed=1)
    for left, right in ((a.permute(2, 0, 1), b.mT), (a[::2].transpose(1, 2), b.mT[..., ::2])):
        found = value_and_gradients(left, right)
        expected = value_and_gradients(left.contiguous(), right.contiguous())
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    value, ga, gb = value_and_gradients(torch.zeros(0, 4), torch.ones(4, 5))
    assert value.shape == (0, 5)
    assert ga.shape == (0, 4)
    assert torch.equal(gb, torch.zeros(4, 5))


# Compiled.


def targets(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


def test_compiled_graphs_hold_the_product_itself() -> None:
    """A flag set in `forward` would not reach a compiled graph; the op carries it along, backward too."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(product, fullgraph=True, backend=backend)
    for lower in LOWERINGS:
        lower()
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = compiled(a, b)
        gradients = torch.autograd.grad(value, (a, b), normal(*value.shape, seed=2))
        assert same([value.detach(), *gradients], PLAIN)
    for graph in graphs:
        assert "comhe.product.default" in targets(graph)
        assert not {name for name in targets(graph) if "mm" in name or "matmul" in name}
    assert len(graphs) >= 2


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch.compiler.reset()
    compiled = torch.compile(product, fullgraph=True)
    for lower in (set_nothing, set_medium):
        lower()
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = compiled(a, b)
        gradients = torch.autograd.grad(value, (a, b), normal(*value.shape, seed=2))
        assert same([value.detach(), *gradients], PLAIN)
