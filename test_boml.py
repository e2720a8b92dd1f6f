"""What boml.py promises, as properties. Sizes and seeds are drawn by hypothesis, arrays from the seed; float64.

The plain versions that the properties compare with are also what `bash run.sh bench` measures boml.py against (the end).
"""
import argparse, contextlib, dataclasses, functools, gzip, hashlib, http.server, io, itertools, json, math, multiprocessing
import os, pickle, re, resource, runpy, shutil, signal, struct, subprocess, sys, tarfile, tempfile, threading, time
import traceback, zipfile, zlib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import boml
import data_prep
import reference_numpy as reference

settings.register_profile("boml", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("boml")
torch.set_num_threads(1)
HERE = Path(__file__).parent
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="session", autouse=True)
def cpu_by_default():
    """The tests mean the CPU, also where there is a GPU; those that mean another device name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def assert_close(a, b, rtol=1e-9, atol=1e-11):
    """Equal within tolerance; else says where they differ most, by how much, and their ratio."""
    a, b = (x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    bad = abs(a - b) - (atol + rtol * abs(b))
    if not (bad <= 0).all():
        i = np.unravel_index(np.where(np.isnan(bad), np.inf, bad).argmax(), bad.shape)
        raise AssertionError(f"worst at {i}: {a[i]!r} against {b[i]!r}, ratio {a[i] / b[i] if b[i] else np.inf}")


@contextlib.contextmanager
def doubles():
    """New tensors are float64 inside; `@doubles()` does it for a whole function."""
    torch.set_default_dtype(torch.double)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float)


def toy_config(**changes):
    small = dict(filters=4, query=2, meta_batch=2, eval_tasks=2, hessian_tasks=3, mc_samples=2)
    return dataclasses.replace(boml.Config(), **small | changes)


def toy_data(seed=0, classes=15, least=4, most=7, channels=1, name="omniglot", iterations=3, **setting):
    """A dataset of noise, its classes of different sizes; a third of them for each split."""
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(least, most + 1, (classes,), generator=g)
    images = torch.randint(0, 256, (int(count.sum()), channels, 28, 28), generator=g, dtype=torch.uint8)
    first = count.cumsum(0) - count
    rows = torch.arange(int(count.max()))[None] + first[:, None]
    rows = rows.masked_fill(torch.arange(rows.shape[1])[None] >= count[:, None], -1)
    third = classes // 3
    splits = {s: torch.arange(a * third, (a + 1) * third) for a, s in enumerate(boml.SPLITS)}
    usual = dict(inner_steps=1, eval_steps=1, iterations=iterations)
    return boml.Dataset(name, "real", [f"{c // 5}/{c % 5}" for c in range(classes)],
                        boml.DATASETS[name]._replace(**usual | setting), images, rows, splits)


def load(name, folder):
    """A packed dataset with its own setting."""
    return boml.load_dataset(folder / f"{name}.npz", boml.DATASETS[name])


def toy_batch(seed, tasks=2, shot=1, query=2, way=5, channels=1):
    """x_s, y_s, x_q, y_q of random images, and parameters, in float64."""
    g = torch.Generator().manual_seed(seed)
    x = lambda n: torch.rand(tasks, way * n, channels, 28, 28, generator=g, dtype=torch.double)
    y = lambda n: torch.arange(way).repeat_interleave(n).expand(tasks, -1)
    theta = boml.init_params(toy_config(way=way, channels=channels), g)
    theta = boml.leaves({n: (v + 0.1 * torch.randn(v.shape, generator=g)).double() for n, v in theta.items()})
    return theta, (x(shot), y(shot), x(query), y(query))


def rates(*values):
    """alpha, one for all tasks or one for each."""
    return torch.tensor(values, dtype=torch.double)


ALPHA = rates(0.4)


# ------------------------------------------------------------------------------------------------ Plain versions


def plain_adapted(theta, x, y, alpha, k, second_order=True):
    """One task's adapted parameters, with their graph."""
    p = theta
    for _ in range(k):
        loss = F.cross_entropy(boml.plain_network(p, x), y)
        grads = torch.autograd.grad(loss, list(p.values()), create_graph=second_order)
        p = {n: v - alpha * g for (n, v), g in zip(p.items(), grads)}
    return p


def plain_adapt(p, x, y, alpha, k):
    """First-order adaptation of one network."""
    for _ in range(k):
        p = {n: v.detach().requires_grad_() for n, v in p.items()}
        grads = torch.autograd.grad(F.cross_entropy(boml.plain_network(p, x), y), list(p.values()))
        p = {n: v - alpha * g for (n, v), g in zip(p.items(), grads)}
    return {n: v.detach().requires_grad_() for n, v in p.items()}


def plain_loss(theta, batch, alpha, k, support_weight, second_order=True):
    """The objective as a loop over tasks, one graph; alpha (T,) or (1,)."""
    total = 0.0
    for a, x_s, y_s, x_q, y_q in zip(alpha.expand(len(batch[0])), *batch):
        adapted = plain_adapted(theta, x_s, y_s, a, k, second_order)
        total = total + F.cross_entropy(boml.plain_network(adapted, x_q), y_q)
        total = total + support_weight * F.cross_entropy(boml.plain_network(theta, x_s), y_s)
    return total


def plain_factors(p, x, u):
    """K-FAC of one network, by unfolding: of each layer (A, G), or (F,) for batch norm; labels by uniform numbers u."""
    inputs, outputs = {}, {}

    def keep(name, x, h):
        inputs[name], outputs[name] = x.detach(), h
        return h

    for i in range(1, 5):
        x = keep(f"conv{i}", x, F.conv2d(x, p[f"conv{i}.weight"], padding=1))
        x = keep(f"norm{i}", x, F.batch_norm(x, None, None, p[f"norm{i}.weight"], p[f"norm{i}.bias"], training=True))
        x = F.max_pool2d(F.relu(x), 2)
    x = x.flatten(1)
    logits = keep("linear", x, F.linear(x, p["linear.weight"], p["linear.bias"]))
    prob = logits.detach().softmax(-1)
    y = (prob.cumsum(-1)[:, :-1] <= u[:, None]).sum(-1)
    grads = torch.autograd.grad(logits, list(outputs.values()), prob - F.one_hot(y, prob.shape[1]).to(prob))
    factors = {}
    for name, g in zip(outputs, grads):
        x = inputs[name]
        if name.startswith("conv"):
            patches = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)  # (B*L, 9C)
            g = g.flatten(2).transpose(1, 2).flatten(0, 1)  # (B*L, O)
            factors[name] = patches.T @ patches / len(x), g.T @ g / len(g)
        elif name.startswith("norm"):
            normal = F.batch_norm(x, None, None, training=True)
            g = torch.stack([(g * normal).sum((0, 2, 3)), g.sum((0, 2, 3))], -1)
            factors[name] = (torch.einsum("ci,cj->cij", g, g) / len(x),)
        else:
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
            factors[name] = x.T @ x / len(x), g.T @ g / len(x)
    return factors


def plain_curvature(theta, batch, alpha, k, a):
    """The sum over tasks of the four Kronecker terms, task by task, support and query on their own."""
    sums = {}
    for x_s, y_s, x_q, _, u_s, u_q in zip(*batch):
        support = plain_factors(theta, x_s, u_s)
        query = plain_factors(plain_adapt(theta, x_s, y_s, alpha, k), x_q, u_q)
        for name, s in support.items():
            q = query[name]
            if len(s) == 1:
                J = torch.eye(2, dtype=s[0].dtype) - a * s[0]
                new = [J @ q[0] @ J.mT]
            else:
                new = [f for X, X_q in zip(s, q) for f in (X_q, X @ X_q, X_q @ X, X @ X_q @ X)]
            sums[name] = [x + y for x, y in zip(sums[name], new)] if name in sums else new
    return sums


def plain_variational(posterior, theta, batch, alpha, k, rngs):
    """BomVI's objective with all S samples at once, a task at a time, one graph; a generator per task and sample."""
    total, S, weight = 0.0, len(rngs[0]), posterior.cfg.shot / posterior.cfg.query
    variance = boml.spread({n: v.exp() for n, v in posterior.logvar.items()}, S)

    def expected(p, x, y, rngs):
        x = x.expand(S, *x.shape)
        noise = boml.fill(boml.room_for_noise(boml.spread(p, S), x), rngs)
        logits = boml.network(boml.spread(p, S), x, boml.noisy_layer(variance, noise))
        return F.cross_entropy(logits.flatten(0, 1), y.repeat(S))

    for x_s, y_s, x_q, y_q, r in zip(*batch, rngs):
        total = total + expected(plain_adapted(theta, x_s, y_s, alpha, k), x_q, y_q, r)
        total = total + weight * expected(theta, x_s, y_s, r)
    return total


def plain_accuracy(theta, batch, alpha, k):
    """Of each task, adapted on its own."""
    guesses = [boml.plain_network(plain_adapt(theta, x_s, y_s, alpha, k), x_q).argmax(-1)
               for x_s, y_s, x_q, _ in zip(*batch)]
    return (torch.stack(guesses) == batch[3]).double().mean(1)


# -------------------------------------------------------------------------------------------- Network, adaptation


@given(seeds, st.integers(1, 3), st.sampled_from([1, 3]), st.booleans())
def test_network_equals_plain_one(seed, tasks, channels, twice):
    """The logits of T networks, first block folded or not, in either layout, are those of each on its own."""
    theta, (_, _, x, _) = toy_batch(seed, tasks, channels=channels)
    g = torch.Generator().manual_seed(seed)
    p = {n: torch.stack([v + 0.3 * torch.randn(v.shape, generator=g, dtype=torch.double) for _ in range(tasks)])
         for n, v in theta.items()}
    expected = torch.stack([boml.plain_network({n: v[m] for n, v in p.items()}, x[m]) for m in range(tasks)])
    assert_close(boml.network(p, x, second_order=twice), expected, rtol=1e-8, atol=1e-9)
    unfolded = lambda p, name, x: boml.layer(p, name, x)
    assert_close(boml.network(p, x, unfolded, twice), expected, rtol=1e-8, atol=1e-9)


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3]))
def test_curvature_equals_plain_loop(seed, tasks, steps, channels):
    """On the real network the batched curvature is that of a plain per-task loop with unfolding, labels drawn alike."""
    theta, batch = toy_batch(seed, tasks, channels=channels)
    g = torch.Generator().manual_seed(seed)
    batch += tuple(torch.rand(y.shape, generator=g, dtype=torch.double) for y in (batch[1], batch[3]))
    blocks = boml.adapted_curvature(theta, [batch], ALPHA, steps, 0.4, toy_config(averaging="products"))
    for name, expected in plain_curvature(theta, batch, 0.4, steps, 0.4).items():
        if len(expected) == 1:
            assert_close(blocks[name][0], expected[0] / tasks, rtol=1e-7, atol=1e-9)
            continue
        for f, e in zip(blocks[name], (expected[:4], expected[4:])):
            scale = torch.tensor([1, -0.4, -0.4, 0.16])[:, None, None].double() if f is blocks[name][1] else 1.0
            e = torch.stack(e) * scale / tasks
            assert_close(f / e.abs().max(), e / e.abs().max(), rtol=1e-7, atol=1e-9)


@given(seeds, st.integers(1, 2), st.integers(1, 2))
def test_variational_gradient_equals_plain_one(seed, tasks, steps):
    """A sample after the other gives the objective and gradient of all samples at once, noise being the same."""
    theta, batch = toy_batch(seed, tasks)
    posterior = variational(theta, -4.0, mc_samples=1)
    make = lambda m, s: torch.Generator().manual_seed(seed + 10 * m + s)
    parts = [posterior.gradient(theta, batch, ALPHA, steps, [make(m, s) for m in range(tasks)]) for s in range(3)]
    rngs = [[make(m, s) for s in range(3)] for m in range(tasks)]
    plain = plain_variational(posterior, theta, batch, 0.4, steps, rngs)
    assert_close(sum(loss for loss, _ in parts) / 3, plain)
    params = [*theta.values(), *posterior.logvar.values()]
    for g, e in zip(zip(*(grads for _, grads in parts)), torch.autograd.grad(plain, params), strict=True):
        assert_close(sum(g) / 3, e, rtol=1e-6, atol=1e-9)


@given(seeds, st.integers(1, 3))
def test_batched_adaptation_equals_plain_loop(seed, steps):
    """All tasks adapt at once, each with its own alpha, to the parameters that it would come to on its own."""
    theta, (x_s, y_s, _, _) = toy_batch(seed, 3)
    alpha = rates(0.1, 0.4, 0.2)
    adapted, loss = boml.adapt(boml.leaves(boml.spread(theta, 3)), x_s, y_s, alpha, steps)
    for m in range(3):
        assert_close(loss[m], F.cross_entropy(boml.plain_network(theta, x_s[m]), y_s[m]))
        for n, v in plain_adapted(theta, x_s[m], y_s[m], alpha[m], steps).items():
            assert_close(adapted[n][m], v, rtol=1e-7, atol=1e-9)


@given(seeds, st.sampled_from([0.1, 0.4]), st.integers(1, 3))
@doubles()
def test_evaluation_equals_plain_loop(seed, rate, steps):
    """Every dataset is evaluated with its own alpha and k, and scored as by a plain loop over its tasks."""
    theta, _ = toy_batch(seed)
    data, cfg = toy_data(seed, inner_rate=rate, inner_steps=7, eval_steps=steps), toy_config(channels=1, eval_tasks=6)
    found = boml.evaluate(theta, boml.Posterior(cfg, theta), data, cfg, seed)
    index = boml.sample_tasks(data, "test", 6, cfg, boml.stream("cpu", seed, "evaluate", data.name))
    assert_close(found["accuracy"], plain_accuracy(theta, boml.fetch(data, index, cfg), rate, steps).mean())


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1, 3]))
def test_meta_gradient_equals_plain_loop(seed, tasks, steps, support_weight, channels):
    """The batched loss and meta-gradient are those of a plain per-task loop, each task with its own alpha."""
    theta, batch = toy_batch(seed, tasks, channels=channels)
    alpha = rates(0.4, 0.1, 0.2)[:tasks]
    loss, grads = boml.meta_gradient(theta, batch, alpha, steps, support_weight)
    expected = plain_loss(theta, batch, alpha, steps, support_weight)
    assert_close(loss, expected)
    for g, e in zip(grads, torch.autograd.grad(expected, list(theta.values())), strict=True):
        assert_close(g, e, rtol=1e-7, atol=1e-10)


@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 1.0]))
def test_meta_gradient_equals_finite_differences(seed, steps, support_weight):
    """Along a random direction the meta-gradient is the central difference of the loss.

    The step is tiny because a ReLU or a maximum that flips inside it makes the adapted loss jump.
    """
    theta, batch = toy_batch(seed)
    g = torch.Generator().manual_seed(seed + 1)
    direction = {n: torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in theta.items()}
    moved = lambda e: {n: v + e * direction[n] for n, v in theta.items()}
    loss = lambda e: plain_loss(moved(e), batch, ALPHA, steps, support_weight)
    _, grads = boml.meta_gradient(theta, batch, ALPHA, steps, support_weight)
    slope = sum((a * b).sum() for a, b in zip(grads, direction.values()))
    assert_close(slope, (loss(1e-9) - loss(-1e-9)) / 2e-9, rtol=1e-4, atol=1e-5)


@given(seeds)
def test_meta_gradient_is_not_first_order(seed):
    """Leaving the adaptation's own derivative out gives another gradient."""
    theta, batch = toy_batch(seed)
    _, grads = boml.meta_gradient(theta, batch, ALPHA, 1, 0.0)
    first_order = torch.autograd.grad(plain_loss(theta, batch, ALPHA, 1, 0.0, False), list(theta.values()))
    apart = torch.cat([(a - b).flatten() for a, b in zip(grads, first_order)]).norm()
    assert apart > 0.01 * torch.cat([b.flatten() for b in first_order]).norm()


@given(seeds, st.integers(1, 5))
def test_zero_rate_adapts_nothing(seed, steps):
    """With alpha = 0 adaptation is the identity."""
    theta, (x_s, y_s, _, _) = toy_batch(seed)
    p = boml.spread(theta, len(x_s))
    for a, b in zip(boml.adapt(p, x_s, y_s, rates(0.0), steps)[0].values(), p.values()):
        assert torch.equal(a, b)


@given(seeds, st.permutations(range(5)))
def test_relabelling_classes(seed, order):
    """Permuting the labels together with the last layer's rows leaves the loss and permutes the gradient."""
    theta, (x_s, y_s, x_q, y_q) = toy_batch(seed)
    order = torch.tensor(order)
    loss, grads = boml.meta_gradient(theta, (x_s, y_s, x_q, y_q), ALPHA, 2, 1.0)
    renamed = boml.leaves({n: v[order.argsort()] if n.startswith("linear") else v for n, v in theta.items()})
    loss2, grads2 = boml.meta_gradient(renamed, (x_s, order[y_s], x_q, order[y_q]), ALPHA, 2, 1.0)
    assert_close(loss, loss2)
    for name, g, g2 in zip(theta, grads, grads2):
        assert_close(g2[order] if name.startswith("linear") else g2, g, rtol=1e-7, atol=1e-9)


@given(seeds)
def test_conv_bias_cancels(seed):
    """The network's logits are those of one with any conv biases, which is why it has none."""
    theta, (x_s, *_) = toy_batch(seed)
    bias = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    logits, conv2d = boml.network(boml.spread(theta, 1), x_s[:1])[0], F.conv2d
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", lambda x, w, padding: conv2d(x, w, bias, padding=padding))
        assert_close(boml.plain_network(theta, x_s[0]), logits, rtol=1e-8, atol=1e-9)


@given(seeds)
def test_norm_uses_the_batch(seed):
    """Batch norm has each task's own statistics: another task in the meta-batch changes nothing."""
    theta, (x_s, *_) = toy_batch(seed, tasks=3)
    together = boml.network(boml.spread(theta, 3), x_s)
    assert_close(boml.network(boml.spread(theta, 1), x_s[1:2]), together[1:2])


# -------------------------------------------------------------------------------------------------------- Laplace
# The tiny tanh network of reference_numpy.py, run by boml's own code.


def tanh_network(p, x, apply=boml.layer, second_order=False):
    """Linear layers with tanh between them, for T tasks: stands in for boml.network."""
    *hidden, last = boml.layers_of(p)
    for name in hidden:
        x = torch.tanh(apply(p, name, x))
    return apply(p, last, x)


def tiny(seed, sizes=(3, 4, 3), tasks=2, support=3, query=4, weight=1.0):
    """A network as reference_numpy has it and as boml has it, and tasks likewise."""
    rng = np.random.default_rng(seed)
    net = [weight * rng.normal(size=(o, i + 1)) for i, o in zip(sizes, sizes[1:])]
    theta = {}
    for l, W in enumerate(net):
        theta[f"linear{l}.weight"], theta[f"linear{l}.bias"] = torch.tensor(W[:, :-1]), torch.tensor(W[:, -1])
    theta = {n: v.clone().requires_grad_() for n, v in theta.items()}
    draw = lambda n: (rng.normal(size=(n, sizes[0])), rng.integers(0, sizes[-1], n))
    listed = [(*draw(support), *draw(query)) for _ in range(tasks)]
    return net, theta, listed, tuple(torch.tensor(np.stack(part)) for part in zip(*listed))


def dense(block):
    """The matrix that a block stands for; batch norm's with the channels one after another."""
    if len(block) == 1:
        return torch.block_diag(*block[0]).detach().numpy()
    return sum(np.kron(A, G) for A, G in zip(*(f.detach().numpy() for f in block)))


def random_block(seed, pairs, P=4, O=3, psd=False, width=5):
    """A symmetric sum of Kronecker pairs: each non-symmetric pair comes with its transpose, as cross terms do; or, for
    `psd`, every factor is the sum of `width` outer products."""
    g = torch.Generator().manual_seed(seed)
    A, G = (torch.randn(pairs, n, width if psd else n, generator=g, dtype=torch.double) for n in (P, O))
    return (A @ A.mT, G @ G.mT) if psd else (torch.cat([A, A.mT]), torch.cat([G, G.mT]))


def curvature(theta, batch, rate, steps, a, averaging="averages", **changes):
    cfg = toy_config(averaging=averaging, **dict(exact_labels=True) | changes)
    batch = (*batch, *(torch.zeros(y.shape) for y in batch[1::2]))
    return boml.adapted_curvature(theta, [batch], rates(rate), steps, a, cfg, tanh_network)


def laplace(blocks, mean, **changes):
    posterior = boml.Laplace(toy_config(**changes), {})
    posterior.mean, posterior.blocks = mean, blocks
    return posterior


def exact_blocks(theta, x, T=1):
    """K-FAC of the tiny network, by expectation over labels."""
    return boml.fisher_blocks(boml.spread(theta, T), x, torch.zeros(x.shape[:2]), True, tanh_network)


@given(seeds, st.integers(1, 4))
def test_operator_equals_dense_kronecker(seed, pairs):
    """The block's product with vec(D) is that of the dense sum of Kronecker products."""
    block = random_block(seed, pairs)
    D = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    product = dense(block) @ D.numpy().flatten(order="F")
    assert_close(boml.times(block, D).numpy().flatten(order="F"), product)


@given(seeds)
def test_one_example_is_exact(seed):
    """On one example every layer's K-FAC block, expectation over labels, equals the exact Fisher's."""
    net, theta, tasks, batch = tiny(seed, sizes=(3, 4, 3, 3), tasks=1, query=1)
    exact = reference.fisher(net, tasks[0][2])
    for block, s in zip(exact_blocks(theta, batch[2]).values(), reference.blocks(net), strict=True):
        assert_close(dense(block), exact[s, s])


@given(seeds)
def test_exact_on_a_linear_network_of_one_layer_and_equal_probabilities(seed):
    """Where G does not depend on the input, as for a linear softmax with zero weights, K-FAC is exact on many
    examples."""
    net, theta, tasks, batch = tiny(seed, sizes=(3, 4), tasks=1, weight=0.0)
    assert_close(dense(exact_blocks(theta, batch[2])["linear0"]), reference.fisher(net, tasks[0][2]))


@given(seeds)
def test_kfac_factors_equal_reference(seed):
    """A and G of every layer and task are the reference's."""
    net, theta, tasks, batch = tiny(seed)
    blocks = exact_blocks(theta, batch[2], 2)
    for m, task in enumerate(tasks):
        A, G = reference.kfac_factors(net, task[2])
        for l, (a, g) in enumerate(blocks.values()):
            assert_close(a[m], A[l])
            assert_close(g[m], G[l])


def test_drawn_labels_approach_exact_ones():
    """The mean of many factors with labels drawn from the model approaches that with the expectation over labels,
    and not the empirical Fisher of the data's labels."""
    net, theta, tasks, batch = tiny(5, tasks=1)
    exact = exact_blocks(theta, batch[2])
    u = torch.rand(4000, batch[2].shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.double)
    many = boml.fisher_blocks(boml.spread(theta, 4000), batch[2].expand(4000, -1, -1), u, False, tanh_network)
    for name in exact:
        G, mean, sd = exact[name][1][0], many[name][1].mean(0), many[name][1].std(0)
        assert ((mean - G).abs() <= 5 * sd / 4000**0.5 + 1e-12).all(), name
    empirical = [np.outer(g, g) for x, y in zip(tasks[0][2], tasks[0][3]) for g in [reference.gradient(net, x, y)]]
    s = reference.blocks(net)[1]
    assert abs(np.mean(empirical, 0)[s, s] - dense(exact["linear1"])).max() > 0.05


def test_drawn_labels_approach_exact_ones_through_batch_norm():
    """So it is where batch norm mixes the images, whose gradients the exact labels' random signs keep apart."""
    theta, batch = toy_batch(0, tasks=1)
    n, x = 100, batch[2]
    u = torch.rand(2, n, x.shape[1], generator=torch.Generator().manual_seed(0))
    p = boml.leaves(boml.spread(theta, n))
    drawn, exact = (boml.fisher_blocks(p, x.expand(n, *x.shape[1:]), u[e], bool(e)) for e in (0, 1))
    for name in drawn:
        a, b = drawn[name][-1], exact[name][-1]
        assert ((a.mean(0) - b.mean(0)).abs() <= 5 * ((a.var(0) + b.var(0)) / n).sqrt() + 1e-12).all(), name


@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 0.5]))
def test_reference_meta_gradient_equals_boml(seed, steps, support_weight):
    """The reference's explicit meta-gradient is autograd's."""
    net, theta, tasks, batch = tiny(seed)
    _, grads = boml.meta_gradient(theta, batch, ALPHA, steps, support_weight, tanh_network)
    mine = dict(zip(theta, grads))
    flat = [boml.to_matrix(mine, name).detach().numpy().flatten(order="F") / 2 for name in boml.layers_of(theta)]
    assert_close(np.concatenate(flat), reference.meta_gradient(net, tasks, 0.4, steps, support_weight))


@given(seeds, st.integers(1, 3))
def test_adaptation_jacobian_equals_reference(seed, steps):
    """The Jacobian of boml's adaptation, by autograd, is the reference's product of I - alpha H."""
    net, theta, tasks, batch = tiny(seed, tasks=1)
    adapted, _ = boml.adapt(boml.spread(theta, 1), batch[0], batch[1], ALPHA, steps, True, tanh_network)
    vec = lambda q: torch.cat([boml.to_matrix(q, name).T.flatten() for name in boml.layers_of(theta)])
    rows = []
    for out in vec({n: v[0] for n, v in adapted.items()}):
        rows.append(vec(dict(zip(theta, torch.autograd.grad(out, list(theta.values()), retain_graph=True)))))
    assert_close(torch.stack(rows), reference.jacobian(net, *tasks[0][:2], 0.4, steps))


@given(seeds, st.sampled_from(["averages", "products"]), st.sampled_from([0.0, 0.4, 1.0]))
def test_one_task_expands_to_the_exact_sandwich(seed, averaging, a):
    """For a single task both ways of averaging give (I - a A(x)G)(A_q(x)G_q)(I - a A(x)G)'."""
    net, theta, tasks, batch = tiny(seed, tasks=1)
    x_s, y_s, x_q, _ = tasks[0]
    A, G = reference.kfac_factors(net, x_s)
    A_q, G_q = reference.kfac_factors(reference.adapt(net, x_s, y_s, 0.4, 2)[1], x_q)
    for l, block in enumerate(curvature(theta, batch, 0.4, 2, a, averaging).values()):
        assert_close(dense(block), reference.sandwich(A[l], G[l], A_q[l], G_q[l], a))


@given(seeds, st.sampled_from(["averages", "products"]), st.integers(2, 4))
def test_many_tasks_expand_to_the_four_terms(seed, averaging, n):
    """Over several tasks each way of averaging gives the reference's four dense terms."""
    net, theta, tasks, batch = tiny(seed, tasks=n)
    support = [reference.kfac_factors(net, t[0]) for t in tasks]
    query = [reference.kfac_factors(reference.adapt(net, t[0], t[1], 0.4, 1)[1], t[2]) for t in tasks]
    for l, block in enumerate(curvature(theta, batch, 0.4, 1, 0.4, averaging).values()):
        factors = [[f[side][l] for f in fs] for fs in (support, query) for side in (0, 1)]
        assert_close(dense(block), reference.four_terms(*factors, 0.4, averaging))


@pytest.mark.parametrize("averaging", ["averages", "products"])
@given(seed=seeds, n=st.integers(1, 4), a=st.sampled_from([0.0, 0.4, 1.0, 5.0]), exact_labels=st.booleans())
def test_curvature_is_positive_semidefinite(averaging, seed, n, a, exact_labels):
    """Either way of averaging gives a positive semi-definite block for any draw and any rate.

    `averages` is a square. `products` is (I, -a I) (M_ij (x) N_ij) (I, -a I)', where M is the mean of
    (I, A)' A_q (I, A) and N that of (I, G)' G_q (I, G): the matrix in the middle is a principal submatrix of M (x) N.
    """
    _, theta, _, batch = tiny(seed, tasks=n, weight=2.0)
    g = torch.Generator().manual_seed(seed)
    draws = [torch.rand(y.shape, generator=g, dtype=torch.double) for y in batch[1::2]]
    cfg = toy_config(averaging=averaging, exact_labels=exact_labels)
    blocks = boml.adapted_curvature(theta, [(*batch, *draws)], ALPHA, 1, a, cfg, tanh_network)
    for block in blocks.values():
        eigenvalues = np.linalg.eigvalsh(dense(block))
        assert eigenvalues[0] > -1e-10 * max(eigenvalues[-1], 1e-30)


@given(seeds, st.sampled_from(["averages", "products"]), st.integers(2, 3))
def test_copies_of_a_task_change_nothing(seed, averaging, copies):
    """The curvature of several copies of a task is that of the task."""
    _, theta, _, batch = tiny(seed, tasks=1)
    one = curvature(theta, batch, 0.4, 1, 0.4, averaging)
    many = curvature(theta, tuple(b.expand(copies, *b.shape[1:]) for b in batch), 0.4, 1, 0.4, averaging)
    for name in one:
        assert_close(dense(many[name]), dense(one[name]))


@given(seeds, st.sampled_from(["averages", "products"]), st.integers(1, 5), st.integers(1, 5))
def test_support_hessian_is_added(seed, averaging, shot, query):
    """With support_hessian the block grows by the mean A (x) mean G of the support sets at theta, times the weight K/Q
    of the support loss."""
    net, theta, tasks, batch = tiny(seed)
    A, G = (np.mean(f, 0) for f in zip(*[[f[1] for f in reference.kfac_factors(net, t[0])] for t in tasks]))
    plain, more = (dense(curvature(theta, batch, 0.4, 1, 0.4, averaging, support_hessian=h, shot=shot, query=query)["linear1"])
                   for h in (False, True))
    assert_close(more - plain, shot / query * np.kron(A, G), atol=1e-10)


@given(seeds, st.integers(1, 2))
def test_conv_at_one_location_equals_linear(seed, tasks):
    """On 1x1 images a conv's factors are the linear layer's on the one patch, the image at its centre."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, tasks * 2, 1, 1, generator=g, dtype=torch.double)
    flat = x.view(4, tasks, 2).transpose(0, 1)
    A = boml.input_factor("conv1", x, tasks).unflatten(1, (2, 9)).unflatten(3, (2, 9))
    linear = boml.input_factor("linear", flat, tasks)[:, :-1, :-1]
    assert_close(A[:, :, 4, :, 4], linear)
    assert_close(A.abs().sum(), linear.abs().sum())  # and nothing elsewhere
    assert_close(boml.output_factor("conv1", x, x, tasks), boml.output_factor("linear", None, flat, tasks))


@given(seeds, st.integers(1, 2), st.integers(1, 3), st.integers(2, 5))
def test_conv_factors_equal_brute_force(seed, tasks, channels, size):
    """A sums the patches' outer products over locations and averages over images; G averages over both."""
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(3, tasks, channels, size, size)), rng.normal(size=(3, tasks, 2, size, size))
    padded = np.pad(x, ((0, 0),) * 3 + ((1, 1),) * 2)
    for m in range(tasks):
        A, G = 0.0, 0.0
        for b in range(3):
            for i in range(size):
                for j in range(size):
                    patch = padded[b, m, :, i : i + 3, j : j + 3].ravel()
                    signal = g[b, m, :, i, j]
                    A, G = A + np.outer(patch, patch) / 3, G + np.outer(signal, signal) / (3 * size * size)
        assert_close(boml.input_factor("conv1", torch.tensor(x).flatten(1, 2), tasks)[m], A)
        assert_close(boml.output_factor("conv1", None, torch.tensor(g).flatten(1, 2), tasks)[m], G)


@given(seeds, st.integers(1, 3))
def test_conv_weights_are_flattened_as_patches_are(seed, channels):
    """A conv is the product of its weights' matrix with F.unfold's patches, so A and the weights share their order:
    the penalty's D A D' is the mean over images of |conv(x, D)|^2."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, channels, 5, 5, generator=g, dtype=torch.double)
    W = {"conv1.weight": torch.randn(2, channels, 3, 3, generator=g, dtype=torch.double)}
    D = boml.to_matrix(W, "conv1")
    A = boml.input_factor("conv1", x, 1)[0]
    h = F.conv2d(x, W["conv1.weight"], padding=1)
    assert_close(D @ A @ D.T, torch.einsum("bohw,bphw->op", h, h) / 4)


@given(seeds, st.integers(1, 2))
def test_norm_block_equals_brute_force(seed, tasks):
    """Batch norm's block is the outer product of the gradient in a channel's scale and shift, summed over the batch,
    divided by the number of images."""
    g = torch.Generator().manual_seed(seed)
    x, signal = (torch.randn(4, tasks * 3, 2, 2, generator=g, dtype=torch.double) for _ in range(2))
    block = boml.output_factor("norm1", x, signal, tasks)
    for m in range(tasks):
        for c in range(3):
            own = torch.tensor([[1.0], [0.0]], dtype=torch.double, requires_grad=True)
            mine = slice(m * 3 + c, m * 3 + c + 1)
            out = F.batch_norm(x[:, mine], None, None, own[0], own[1], training=True)
            (v,) = torch.autograd.grad(out, own, signal[:, mine])
            assert_close(block[m, c], v @ v.T / 4)


@given(seeds, st.sampled_from(["averages", "products"]))
def test_norm_sandwich(seed, averaging):
    """Batch norm's 2x2 blocks go through the same sandwich, task by task or averaged first."""
    rng = np.random.default_rng(seed)
    F_s, F_q = ((m := rng.normal(size=(3, 4, 2, 2))) @ m.swapaxes(-1, -2) for _ in range(2))
    J = lambda f: np.eye(2) - 0.4 * f
    if averaging == "products":
        got = boml.sandwich((torch.tensor(F_s),), (torch.tensor(F_q),), 0.4)[0].mean(0)
        expected = np.mean([[J(s) @ q @ J(s).T for s, q in zip(a, b)] for a, b in zip(F_s, F_q)], 0)
    else:
        got = boml.sandwich((torch.tensor(F_s.mean(0)),), (torch.tensor(F_q.mean(0)),), 0.4)[0]
        expected = [J(s) @ q @ J(s).T for s, q in zip(F_s.mean(0), F_q.mean(0))]
    assert_close(got, np.array(expected))


@given(seeds)
def test_curvature_of_the_conv_network(seed):
    """On the real network every layer has its block, finite and positive semi-definite, in the shape of its matrix."""
    theta, batch = toy_batch(seed, channels=3)
    batch += tuple(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) for y in batch[1::2])
    blocks = boml.adapted_curvature(theta, [batch], ALPHA, 2, 0.4, toy_config())
    assert list(blocks) == boml.layers_of(theta)
    for name, block in blocks.items():
        assert boml.times(block, boml.to_matrix(theta, name)).shape == boml.to_matrix(theta, name).shape
        eigenvalues = np.linalg.eigvalsh(dense(block))
        assert np.isfinite(eigenvalues).all() and eigenvalues[0] > -1e-9 * eigenvalues[-1]


@given(seeds)
def test_matrix_and_back(seed):
    """The layers' matrices hold every parameter once and nothing else: the gradient of half their squares is theta."""
    theta, _ = toy_batch(seed)
    matrices = [boml.to_matrix(theta, name) for name in boml.layers_of(theta)]
    assert sum(W.numel() for W in matrices) == sum(v.numel() for v in theta.values())
    back = torch.autograd.grad(sum((W * W.detach()).sum() for W in matrices), list(theta.values()))
    assert all(torch.equal(g, v) for g, v in zip(back, theta.values()))


@given(seeds)
def test_penalty_at_the_mean_is_zero(seed):
    """At the mean the penalty and its gradient vanish."""
    theta, _ = toy_batch(seed)
    blocks = {n: random_block(seed, 2, *reversed(boml.to_matrix(theta, n).shape)) for n in ("conv1", "linear")}
    value, grads = laplace(blocks, {n: v.detach() for n, v in theta.items()}).penalty(theta)
    assert value == 0 and all((g == 0).all() for g in grads)


@given(seeds)
def test_penalty_equals_dense_reference(seed):
    """The penalty is the reference's dense quadratic form, non-negative, and its gradient is its derivative."""
    net, theta, _, batch = tiny(seed)
    blocks = curvature(theta, batch, 0.4, 1, 0.4)
    rng = torch.Generator().manual_seed(seed)
    mean = {n: torch.randn(v.shape, generator=rng, dtype=torch.double) for n, v in theta.items()}
    precision = [dense(b) + 0.01 * np.eye(len(dense(b))) for b in blocks.values()]
    flat = lambda p: [boml.to_matrix(p, n).detach().numpy().flatten(order="F") for n in boml.layers_of(theta)]
    value, grads = laplace(blocks, mean).penalty(theta)
    expected = sum(reference.penalty(t, m, L) for t, m, L in zip(flat(theta), flat(mean), precision))
    assert_close(value, expected)
    assert value >= 0
    for got, t, m, L in zip(flat(dict(zip(theta, grads))), flat(theta), flat(mean), precision, strict=True):
        assert_close(got, L @ (t - m))


@doubles()
def test_absorbing_two_datasets_sums_them():
    """The precision after two datasets is lambda times the sum of their curvatures, around the newest mean."""
    cfg = toy_config(filters=2, way=3, channels=1, merge_rank=0, past_weight=7.0)
    data, posterior = [toy_data(0), toy_data(1)], boml.Laplace(cfg, {})
    thetas = [boml.init_params(cfg, torch.Generator().manual_seed(s)) for s in (0, 1)]
    single = []
    for theta, d in zip(thetas, data):
        posterior.absorb(theta, d, torch.Generator().manual_seed(3))
        alone = boml.Laplace(dataclasses.replace(cfg, past_weight=1.0), {})
        alone.absorb(theta, d, torch.Generator().manual_seed(3))
        single.append(alone.blocks)
    assert list(posterior.blocks) == boml.layers_of(theta)
    for name in posterior.blocks:
        expected = 7.0 * (dense(single[0][name]) + dense(single[1][name]))
        assert_close(dense(posterior.blocks[name]), expected)
    assert all(torch.equal(posterior.mean[n], thetas[1][n]) for n in thetas[1])


@given(seeds, st.integers(1, 3))
def test_merge_is_exact_when_its_rank_suffices(seed, pairs):
    """Pairs that are multiples and copies of few merge into those few without loss."""
    A, G = random_block(seed, pairs, psd=True)
    merged = boml.merge((torch.cat([A, 2 * A]), torch.cat([G, 3 * G])), pairs)
    assert len(merged[0]) == pairs
    assert_close(dense(merged), 7 * dense((A, G)), rtol=1e-8, atol=1e-9)


@settings(max_examples=200)  # the SVD rarely has both factors negative
@given(seeds, st.integers(2, 4), st.sampled_from([1, 5]))
def test_merge_to_one_pair(seed, pairs, width):
    """One pair of a positive semi-definite sum has symmetric positive semi-definite factors and is nearer to the sum
    than any multiple of any of the given pairs."""
    block = random_block(seed, pairs, psd=True, width=width)
    A, G = boml.merge(block, 1)
    for factor in (A[0], G[0]):
        assert_close(factor, factor.T, rtol=1e-9, atol=1e-9)
        assert np.linalg.eigvalsh(factor.numpy())[0] > -1e-9 * np.linalg.eigvalsh(factor.numpy())[-1]
    whole = dense(block)
    error = np.linalg.norm(dense((A, G)) - whole)
    for a, g in zip(*block):
        one = np.kron(a, g)
        best = np.linalg.norm(one * (one * whole).sum() / (one * one).sum() - whole)
        assert error <= best * (1 + 1e-9)


@given(seeds, st.integers(1, 3))
def test_merge_is_symmetric(seed, rank):
    """Merging a symmetric sum with non-symmetric pairs leaves a symmetric matrix, at any rank."""
    merged = dense(boml.merge(random_block(seed, 3), rank))
    assert_close(merged, merged.T, rtol=1e-8, atol=1e-8)


@doubles()
def test_precision_is_positive_semidefinite():
    """What BomLA absorbs has positive semi-definite factors, with either way of averaging and the paper's a = 1."""
    for averaging in ("averages", "products"):
        cfg = toy_config(way=3, channels=1, averaging=averaging, jacobian_rate=1.0)
        theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
        posterior = boml.Laplace(cfg, theta)
        for s in (0, 1):
            posterior.absorb(theta, toy_data(s), torch.Generator().manual_seed(s))
        for block in posterior.blocks.values():
            for factors in block:
                eigenvalues = torch.linalg.eigvalsh(factors)
                assert (eigenvalues[:, 0] >= -1e-9 * eigenvalues[:, -1]).all()


# ---------------------------------------------------------------------------------------------------- Variational


def layer_problem(kind, seed, tasks=2):
    """A layer's name, input, mean and variance of its parameters, one set per task."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.double)
    name, shapes, x = {
        "conv": ("conv2", {"weight": (3, 2, 3, 3)}, normal(4, tasks * 2, 5, 5)),
        "norm": ("norm2", {"weight": (3,), "bias": (3,)}, normal(4, tasks * 3, 2, 2)),
        "linear": ("linear", {"weight": (3, 4), "bias": (3,)}, normal(tasks, 5, 4)),
    }[kind]
    mean = {f"{name}.{n}": normal(tasks, *s) for n, s in shapes.items()}
    return name, x, mean, {n: (normal(*v.shape) - 1).exp() for n, v in mean.items()}


@pytest.mark.parametrize("kind", ["conv", "norm", "linear"])
def test_moments_of_sampled_preactivations(kind):
    """Every sampled pre-activation has the mean and variance of pushing sampled weights through the layer."""
    name, x, mean, variance = layer_problem(kind, 0)
    g, many = torch.Generator().manual_seed(1), 20000
    noise = lambda: torch.randn(2, 300, generator=g, dtype=torch.double)
    local = torch.stack([boml.noisy_layer(variance, noise())(mean, name, x) for _ in range(many)])
    normal = lambda v: torch.randn(v.shape, generator=g, dtype=torch.double)
    draw = lambda: {n: v + variance[n].sqrt() * normal(v) for n, v in mean.items()}
    pushed = torch.stack([boml.layer(draw(), name, x) for _ in range(many)])
    # The analytic moments: linear in the parameters, so means push through and variances through the square.
    middle = boml.layer(mean, name, x)
    spread = 0.0
    for n in mean:
        flat = mean[n][0].numel()
        for j in range(flat):
            one = {m: torch.zeros_like(v) for m, v in mean.items()}
            one[n].view(len(one[n]), -1)[:, j] = 1.0
            response = boml.layer(one, name, x)
            scaled = {m: torch.zeros_like(v) for m, v in mean.items()}
            scaled[n].view(len(one[n]), -1)[:, j] = variance[n].view(len(one[n]), -1)[:, j]
            spread = spread + response * boml.layer(scaled, name, x)
    for samples in (local, pushed):
        se = spread.sqrt() / many**0.5
        assert ((samples.mean(0) - middle).abs() < 5 * se).all()
        assert ((samples.var(0) / spread - 1).abs() < 5 * (2 / many) ** 0.5).all()


@given(seeds)
def test_noise_scales_with_the_standard_deviation(seed):
    """Without variance a sampled pre-activation is the layer's own; four times the variance is twice the noise."""
    for kind in ("conv", "norm", "linear"):
        name, x, mean, variance = layer_problem(kind, seed)
        sure = boml.layer(mean, name, x)
        noise = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
        noisy = lambda v: boml.noisy_layer(v, noise)(mean, name, x)
        assert_close(noisy({n: torch.zeros_like(v) for n, v in variance.items()}), sure, atol=1e-12)
        wider = noisy({n: 4 * v for n, v in variance.items()})
        assert_close(wider - sure, 2 * (noisy(variance) - sure), rtol=1e-7, atol=1e-9)


def variational(theta, logvar, **changes):
    posterior = boml.Variational(toy_config(**changes), theta)
    for v in posterior.logvar.values():
        v.data.fill_(logvar)
    return posterior


@given(seeds, st.integers(1, 3))
def test_no_variance_is_maml(seed, steps):
    """As sigma goes to zero the objective and its gradient are those of the deterministic network, its support loss
    weighed by K/Q as in BomLA."""
    theta, batch = toy_batch(seed)
    rngs = [torch.Generator().manual_seed(seed)] * len(batch[0])
    loss, grads = variational(theta, -200.0).gradient(theta, batch, ALPHA, steps, rngs)
    expected, expected_grads = boml.Laplace(toy_config(), theta).gradient(theta, batch, ALPHA, steps, rngs)
    assert_close(expected, plain_loss(theta, batch, ALPHA, steps, 1 / 2))
    assert_close(loss, expected, rtol=1e-8)
    for g, e in zip(grads[: len(theta)], expected_grads, strict=True):
        assert_close(g, e, rtol=1e-6, atol=1e-8)


@given(seeds, st.integers(1, 6))
def test_kl_equals_dense_formula(seed, n):
    """The KL is the reference's full-matrix formula, and not symmetric in its arguments."""
    m, l, pm, pl = np.random.default_rng(seed).normal(size=(4, n))
    kl = boml.gaussian_kl(*map(torch.tensor, (m, l, pm, pl)))
    assert_close(kl, reference.gaussian_kl(m, np.diag(np.exp(l)), pm, np.diag(np.exp(pl))))
    assert kl >= 0
    assert abs(kl - boml.gaussian_kl(*map(torch.tensor, (pm, pl, m, l)))) > 1e-6


@given(seeds)
def test_kl_with_itself_is_zero(seed):
    """KL(q, q) = 0."""
    m, l = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    assert_close(boml.gaussian_kl(m, l, m, l), 0.0)


@given(seeds, st.sampled_from([0.1, 1.0, 30.0]))
def test_penalty_is_the_kl_to_the_prior(seed, past_weight):
    """The penalty is kl_weight times the KL from the posterior to the prior, at first around the initial mean, which
    after absorbing is the posterior with its variance divided by lambda; so for lambda = 1 the penalty then vanishes,
    and so does its gradient; and the prior stays where it is when the posterior moves on."""
    _, theta, _, _ = tiny(seed)
    posterior = variational(theta, -3.0, kl_weight=0.5, first_variance=2.0, past_weight=past_weight)
    flat = torch.cat([v.detach().flatten() for v in theta.values()]).numpy()
    variance = np.exp(-3.0) * np.eye(len(flat))
    kl = lambda mean, prior_variance: 0.5 * reference.gaussian_kl(flat, variance, mean, prior_variance)
    assert_close(posterior.penalty(theta)[0], kl(flat, 2.0 * np.eye(len(flat))))
    posterior.absorb(theta, None, None)
    value, grads = posterior.penalty(theta)
    assert_close(value, kl(flat, variance / past_weight))
    assert len(grads) == 2 * len(theta) and all(g.abs().max() < 1e-12 for g in grads[: len(theta)])
    if past_weight == 1.0:
        assert_close(value, 0.0)
        assert all(g.abs().max() < 1e-12 for g in grads)
    prior_mean, prior_variance = flat, variance / past_weight
    with torch.no_grad():
        for v in (*theta.values(), *posterior.logvar.values()):
            v += 0.5
    flat, variance = flat + 0.5, variance * np.exp(0.5)
    assert_close(posterior.penalty(theta)[0], kl(prior_mean, prior_variance))


@pytest.mark.parametrize("given_weight, weight", [("paper", 1 / 6), ("authors", 1 / 48000), (0.25, 0.25)])
def test_kl_weight_is_named_or_a_number(given_weight, weight):
    """The KL's weight is one over the query images, the authors' 1/48000, or the number given."""
    _, theta, _, _ = tiny(0)
    value, one = (variational(theta, -3.0, way=3, query=2, kl_weight=w).penalty(theta)[0] for w in (given_weight, 1.0))
    assert_close(value, weight * one)


def test_estimator_is_unbiased():
    """On a tiny network many samples approach the brute-force average over sampled weights."""
    _, theta, _, (x, y, _, _) = tiny(3, tasks=1, weight=0.3)
    g = torch.Generator().manual_seed(0)
    p, many = {n: v.detach() for n, v in theta.items()}, 20000
    wide = {n: v.expand(many, *v.shape) for n, v in p.items()}
    variance = {n: torch.full_like(v, 0.3) for n, v in wide.items()}
    x, y = x.expand(many, -1, -1), y.expand(many, -1)
    noise = torch.randn(many, 100, generator=g, dtype=torch.double)
    local = boml.cross_entropy(tanh_network(wide, x, boml.noisy_layer(variance, noise)), y)
    drawn = {n: v + 0.3**0.5 * torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in wide.items()}
    brute = boml.cross_entropy(tanh_network(drawn, x), y)
    at_mean = boml.cross_entropy(tanh_network(wide, x), y)[0]
    se = ((local.var() + brute.var()) / many).sqrt()
    assert (local.mean() - brute.mean()).abs() < 4 * se
    assert (local.mean() - at_mean).abs() > 20 * se  # and the noise matters


@given(seeds, st.integers(1, 2))
def test_logvar_gradient_equals_finite_differences(seed, steps):
    """Under common random numbers the gradient in the log-variance is the central difference of the objective."""
    theta, batch = toy_batch(seed, tasks=1)
    posterior = variational(theta, -4.0)
    g = torch.Generator().manual_seed(seed + 1)
    direction = {n: torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in theta.items()}
    start = {n: v.detach().clone() for n, v in posterior.logvar.items()}

    def at(e):
        for n, v in posterior.logvar.items():
            v.data.copy_(start[n] + e * direction[n])
        return posterior.gradient(theta, batch, ALPHA, steps, [torch.Generator().manual_seed(seed)])

    slope = sum((a * b).sum() for a, b in zip(at(0.0)[1][len(theta):], direction.values(), strict=True))
    assert_close(slope, (at(1e-8)[0] - at(-1e-8)[0]) / 2e-8, rtol=1e-4, atol=1e-5)


@given(seeds, st.integers(1, 2))
def test_variational_mean_gradient_equals_finite_differences(seed, steps):
    """Under common random numbers the gradient in the mean, adaptation included, is the central difference."""
    theta, batch = toy_batch(seed, tasks=1)
    posterior = variational(theta, -4.0)
    g = torch.Generator().manual_seed(seed + 1)
    direction = {n: torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in theta.items()}

    def at(e):
        moved = {n: (v + e * direction[n]).detach().requires_grad_() for n, v in theta.items()}
        return posterior.gradient(moved, batch, ALPHA, steps, [torch.Generator().manual_seed(seed)])

    slope = sum((a * b).sum() for a, b in zip(at(0.0)[1], direction.values()))
    assert_close(slope, (at(1e-9)[0] - at(-1e-9)[0]) / 2e-9, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- Evaluation


class MadeUp(boml.Posterior):
    """Predicts what it is given: for each task in turn and each image in turn, the probability of the true class."""

    def __init__(self, cfg, theta, true):
        super().__init__(cfg, theta)
        self.true, self.next = true, 0

    def predict(self, adapted, x, rngs):
        T, (way, query) = len(x), (self.cfg.way, self.cfg.query)
        y = torch.arange(way).repeat_interleave(query)
        true = self.true[self.next : self.next + T]
        self.next += T
        prob = ((1 - true) / (way - 1))[..., None].expand(T, way * query, way).clone()
        prob.scatter_(2, y.expand(T, -1)[..., None], true[..., None])
        return {"": prob.log(), "sampled_": (0.5 * prob + 0.5 / way).log()}


@doubles()
def test_scores_of_made_up_predictions():
    """Accuracy, negative log-likelihood and the interval over tasks are those of the definition, in each way of
    predicting."""
    cfg = toy_config(way=2, query=2, channels=1, eval_tasks=6)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    true = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    true[0], true[1] = torch.tensor([0.9, 0.8, 0.4, 0.7]), torch.tensor([0.1, 0.9, 0.2, 0.3])
    got = boml.evaluate(theta, MadeUp(cfg, theta, true), toy_data(), cfg, 0)
    accuracy = (true > 0.5).double().mean(1).numpy()
    assert accuracy[:2].tolist() == [0.75, 0.25]
    for prefix, p in (("", true), ("sampled_", 0.5 * true + 0.25)):
        assert_close(got[prefix + "accuracy"], accuracy.mean())
        assert_close(got[prefix + "ci95"], 1.96 * np.std(accuracy, ddof=1) / 6**0.5)
        assert_close(got[prefix + "nll"], -p.log().mean())


# --------------------------------------------------------------------------------------------------- Data, tasks


def loaded(seed, name, classes=15, least=4, most=7):
    """Noise in classes of different sizes, in no order, packed and loaded; also images and labels as packed."""
    rng, colours = np.random.default_rng(seed), () if name == "omniglot" else (3,)
    labels = rng.permutation(np.repeat(np.arange(classes), rng.integers(least, most + 1, classes)))
    images = rng.integers(0, 256, (len(labels), 28, 28, *colours), dtype=np.uint8)
    names, split = [f"class {c}" for c in range(classes)], np.resize(boml.SPLITS, classes)
    arrays = dict(classes=names, split=split, origin=["real"])
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, f"{name}.npz"), images=images, labels=labels, **arrays)
        return load(name, Path(folder)), images, labels


def owner_of(data):
    """The class of each image, by the rows."""
    owner = torch.full((len(data.images),), -1)
    for c, row in enumerate(data.rows):
        assert (owner[row[row >= 0]] == -1).all()
        owner[row[row >= 0]] = c
    assert (owner >= 0).all()
    return owner


@given(seeds, st.sampled_from(["omniglot", "cifar_fs"]))
def test_rotations_are_classes_of_their_own(seed, name):
    """A loaded class has the images of its label; where the setting says so, also turned by 90, 180 and 270 degrees,
    each a class in the same split."""
    data, images, labels = loaded(seed, name)
    turns = 4 if name == "omniglot" else 1
    assert len(data.classes) == len(set(data.classes)) == len(data.rows) == 15 * turns
    assert len(data.images) == turns * len(images)
    for c, row in enumerate(data.rows):
        found = data.images[row[row >= 0]].permute(0, 2, 3, 1).numpy()
        packed = images[labels == c % 15].reshape(-1, 28, 28, found.shape[-1])
        assert np.array_equal(found, np.rot90(packed, c // 15, (1, 2)))
    for s, split in enumerate(boml.SPLITS):
        expected = [c for c in range(15 * turns) if c % 15 % 3 == s]
        assert sorted(data.splits[split].tolist()) == expected


def test_rotated_classes_outgrow_the_file_s_integers(tmp_path):
    """100 classes with labels of one byte, turned four ways, are 400 classes."""
    np.savez(tmp_path / "omniglot.npz", images=np.zeros((100, 28, 28), np.uint8), labels=np.arange(100, dtype=np.uint8),
             classes=[f"{c:02}" for c in range(100)], split=["train"] * 100, origin=["real"])
    data = boml.load_dataset(tmp_path / "omniglot.npz", boml.DATASETS["omniglot"])
    assert data.rows.flatten().tolist() == list(range(400))


@given(seeds, st.integers(2, 4), st.integers(1, 2), st.integers(1, 2), st.sampled_from(["omniglot", "cifar_fs"]))
def test_sampled_tasks(seed, way, shot, query, name):
    """Classes of a task are distinct, their images are theirs, distinct, and from the asked split."""
    data, cfg = loaded(seed, name)[0], toy_config(way=way, shot=shot, query=query)
    index = boml.sample_tasks(data, "val", 6, cfg, torch.Generator().manual_seed(seed))
    assert index.shape == (6, way, shot + query) and (index >= 0).all()
    owner = owner_of(data)[index]
    assert (owner == owner[..., :1]).all()
    assert set(owner.unique().tolist()) <= set(data.splits["val"].tolist())
    for t in range(6):
        assert len(owner[t].unique()) == way and len(index[t].unique()) == way * (shot + query)


def test_sampling_is_uniform():
    """Over many tasks every class takes every label, and every image every place, about equally often."""
    data, cfg = toy_data(3, classes=9, least=4, most=6), toy_config(way=3, shot=1, query=1)
    index = boml.sample_tasks(data, "train", 20000, cfg, torch.Generator().manual_seed(0))
    owner = owner_of(data)[index]  # (20000, 3, 2)
    by_label = torch.stack([torch.bincount(owner[:, n, 0], minlength=3) for n in range(3)]) / 20000
    assert by_label.shape == (3, 3) and (by_label - 1 / 3).abs().max() < 0.02  # six standard deviations
    for c in range(3):
        row = data.rows[c][data.rows[c] >= 0]
        for place in (0, 1):
            mine = index[..., place][owner[..., place] == c]
            share = (mine[:, None] == row).double().mean(0)
            assert_close(share.sum(), 1.0)
            assert (share - 1 / len(row)).abs().max() < 0.02


@given(seeds)
def test_kept_labels(seed):
    """With --keep-labels the class of each label is the same in all training tasks of N classes, the images vary."""
    data, cfg = toy_data(seed, classes=9), toy_config(way=3, shot=1, query=2, keep_labels=True)
    index = boml.sample_tasks(data, "train", 5, cfg, torch.Generator().manual_seed(seed))
    assert (owner_of(data)[index] == data.splits["train"][:, None]).all() and len(index.unique(dim=0)) > 1


def test_kept_labels_are_not_for_evaluation():
    """With --keep-labels the tasks to evaluate on are those without."""
    data, cfg = toy_data(0, classes=9), toy_config(way=3, shot=1, query=2)
    one, other = (boml.sample_tasks(data, "test", 5, dataclasses.replace(cfg, keep_labels=keep), torch.Generator().manual_seed(0))
                  for keep in (False, True))
    assert torch.equal(one, other)


@given(seeds, st.sampled_from([(1, 1), (1, 3), (3, 3)]))
def test_fetched_images(seed, channels):
    """Images come scaled to [0, 1], expanded to the channels, labels in class order; a blank image is zero."""
    stored, channels = channels
    data, cfg = toy_data(seed, channels=stored), toy_config(way=2, shot=1, query=2, channels=channels)
    index = boml.sample_tasks(data, "train", 3, cfg, torch.Generator().manual_seed(seed))
    data.images[index[0, 0, 0]] = 200
    x_s, y_s, x_q, y_q = boml.fetch(data, index, cfg)
    assert x_s.shape == (3, 2, channels, 28, 28) and x_q.shape == (3, 4, channels, 28, 28)
    assert y_s.tolist() == [[0, 1]] * 3 and y_q.tolist() == [[0, 0, 1, 1]] * 3
    assert (x_s[0, 0] == 0).all()
    for found, i in ((x_s[1, 1], index[1, 1, 0]), (x_q[1, 3], index[1, 1, 2]), (x_q[2, 1], index[2, 0, 2])):
        image = data.images[i].double().numpy()
        image = (image - image.min()) / max(image.max() - image.min(), 1)
        assert_close(found.double(), np.resize(image, (channels, 28, 28)), rtol=1e-6, atol=1e-6)


CLASSES = {"omniglot": (1100, 100, 423), "mini_quickdraw": (241, 52, 52), "cifar_fs": (64, 16, 20),
           "mini_imagenet": (64, 16, 20), "vgg_flowers": (66, 16, 20), "aircraft": (64, 16, 20)}  # the paper's
AUTHORS = {  # md5 of the authors' sorted classes for validation and for test
    "omniglot": ("8fd3d9f33276d37122db642c72bcf263", "eab73285fccd9bf5d2fa0a9faf652740"),
    "mini_quickdraw": ("74bbf8f86e218b71f54b1b3ccbdbc084", "2eecc1fdbaf2548de583f8af1b4f80c3"),
    "cifar_fs": ("1aa669320f5488fcaa240b1ba2f42574", "0ab7d7b728a0ce08dfd3d3fd9e84483f"),
    "mini_imagenet": ("d549e3f2eaf08bafe614eecd1aa08652", "8fda29672090b199c9df315baf382a9a"),
    "vgg_flowers": ("f92b88e56f99ad437fa66d553b12561a", "7d597e327aef9c2f28050d8c026ae18d"),
    "aircraft": ("fc659b943c7a1db52c5f395b7f2b6d41", "f6b7b56408b7d32bfe8614232f6e3095"),
}
LETTERS = {  # characters of the alphabets that the Omniglot sequence holds out
    "Anglo-Saxon_Futhorc": 29, "Arcadian": 26, "Blackfoot_(Canadian_Aboriginal_Syllabics)": 14, "Cyrillic": 33,
    "Ge_ez": 26, "Glagolitic": 45, "N_Ko": 33, "Atemayar_Qelisayer": 26, "Futurama": 26, "Greek": 24,
    "Mkhedruli_(Georgian)": 41, "Syriac_(Estrangelo)": 23, "Syriac_(Serto)": 23, "Tagalog": 17, "Tibetan": 42,
}


@pytest.mark.parametrize("name", AUTHORS)
def test_held_out_classes_are_the_authors(name):
    """The classes for validation and for test of each real dataset are those of the authors' code."""
    found = tuple(hashlib.md5("\n".join(sorted(part)).encode()).hexdigest() for part in data_prep.held_out(name))
    assert found == AUTHORS[name]


@pytest.mark.parametrize("name", data_prep.COUNTS)
def test_split_is_disjoint(name):
    """Training, validation and test classes have the paper's counts and share none, in whatever order they come."""
    counts = data_prep.COUNTS[name]
    assert counts == CLASSES.get(name, counts)
    if name in data_prep.DRAW:
        assert data_prep.split_of(name, []).tolist() == [s for s, n in zip(boml.SPLITS, counts) for _ in range(n)]
        return
    val, test = data_prep.held_out(name)
    assert not val & test
    held = val | test
    if name == "omniglot_alphabets":
        assert held == set(LETTERS)
        held = {f"{a}/character{c:02d}" for a, n in LETTERS.items() for c in range(1, n + 1)}
    names = sorted(held) + [f"other/class {c}" for c in range(counts[0])]
    split = data_prep.split_of(name, names)
    assert tuple((split == s).sum() for s in boml.SPLITS) == counts and len(names) == sum(counts)
    for part, expected in (("val", val), ("test", test)):
        found = {n for n, s in zip(names, split) if s == part}
        assert {n.split("/")[0] for n in found} == expected if name == "omniglot_alphabets" else found == expected
    assert (data_prep.split_of(name, names[::-1]) == split[::-1]).all()


@pytest.mark.parametrize("name", data_prep.DRAW)
def test_drawn_images_vary(name):
    """A generated dataset repeats itself for a seed; its drawings of a class differ yet resemble each other more."""
    draw = lambda: list(data_prep.DRAW[name](np.random.default_rng(1), 6, 8))
    pictures, labels = zip(*draw())
    assert all((a == b).all() for a, (b, _) in zip(pictures, draw()))
    x = np.stack(pictures).reshape(len(labels), -1).astype(float)
    apart = np.linalg.norm(x[:, None] - x[None], axis=-1)
    same = np.equal.outer(labels, labels)
    assert (apart[~np.eye(len(x), dtype=bool)] > 0).all()
    assert apart[same & ~np.eye(len(x), dtype=bool)].mean() < apart[~same].mean()


class Still:
    """An optimiser that never moves."""

    def __init__(self, groups):
        self.param_groups = groups

    def step(self):
        pass


def plain_noisy(p, logvar, x, rng):
    """Logits of one network with normal parameters, by local reparameterisation, layer by layer; all of its noise is one
    draw, of which each layer takes its part, images channels-last."""
    B, filters, way = len(x), len(p["norm1.bias"]), len(p["linear.bias"])
    noise = iter(torch.randn(B * (filters * (784 + 196 + 49 + 9 + 8) + way), generator=rng))
    draw = lambda *shape: torch.stack([next(noise) for _ in range(math.prod(shape))]).view(shape)
    v = {n: l.exp() for n, l in logvar.items()}
    for i in range(1, 5):
        mean = F.conv2d(x, p[f"conv{i}.weight"], padding=1)
        sd = F.conv2d(x**2, v[f"conv{i}.weight"], padding=1).sqrt()
        x = mean + sd * draw(len(x), *mean.shape[2:], mean.shape[1]).permute(0, 3, 1, 2)
        x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        scale, shift = (p[n][:, None, None] + v[n].sqrt()[:, None, None] * draw(len(x), 1, 1, len(p[n])).permute(0, 3, 1, 2)
                        for n in (f"norm{i}.weight", f"norm{i}.bias"))
        x = F.relu(F.max_pool2d(x * scale + shift, 2))
    x = x.flatten(1)
    mean = x @ p["linear.weight"].T + p["linear.bias"]
    sd = (x**2 @ v["linear.weight"].T + v["linear.bias"]).sqrt()
    x = mean + sd * draw(*mean.shape)
    assert next(noise, None) is None
    return x


def vec(p, name):
    """A layer's parameters as one vector: the columns of its matrix, one below the other."""
    w = p[f"{name}.weight"].flatten(1) if p[f"{name}.weight"].dim() > 1 else p[f"{name}.weight"][:, None]
    if f"{name}.bias" in p:
        w = torch.cat([w, p[f"{name}.bias"][:, None]], 1)
    return w.T.flatten()


def dense_block(block):
    """The matrix on `vec` that a block stands for."""
    if len(block) == 2:
        return sum(torch.kron(A, G) for A, G in zip(*block))
    C = len(block[0])
    whole = torch.zeros(2 * C, 2 * C)
    for c in range(C):
        for i in range(2):
            for j in range(2):
                whole[i * C + c, j * C + c] = block[0][c, i, j]
    return whole


def moved_on(method, data, cfg):
    """theta and posterior after a dataset was absorbed twice and theta has moved on in place each time; also the values
    at the second absorbing."""
    theta = boml.init_params(cfg, torch.Generator().manual_seed(3))
    posterior = boml.METHODS[method].posterior(cfg, theta)
    for seed in (4, 5):
        wander(theta, seed)
        wander(getattr(posterior, "logvar", {}), seed)
        posterior.absorb(theta, data, torch.Generator().manual_seed(seed))
    then = {n: v.detach().clone() for n, v in theta.items()}
    then_logvar = {n: v.detach().clone() for n, v in getattr(posterior, "logvar", {}).items()}
    wander(theta, 6)
    wander(getattr(posterior, "logvar", {}), 7)
    return theta, posterior, then, then_logvar


def wander(p, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for v in p.values():
            v += 0.3 * torch.randn(v.shape, generator=g)


def plain_objective(method, theta, posterior, then, then_logvar, batch, cfg, noise):
    """The whole objective of a step, written out: Eq. 2, 8 or 14, divided by the number of query images."""
    total, m = 0.0, 0
    for data, index in batch:
        s = data.setting
        for x_s, y_s, x_q, y_q in zip(*boml.fetch(data, index, cfg)):
            adapted, rng = plain_adapted(theta, x_s, y_s, s.inner_rate, s.inner_steps), noise(m)
            if method == "bomvi":
                loss = lambda p, x, y: sum(F.cross_entropy(plain_noisy(p, posterior.logvar, x, rng), y, reduction="sum")
                                           for _ in range(cfg.mc_samples)) / cfg.mc_samples
                total = total + loss(adapted, x_q, y_q) + loss(theta, x_s, y_s)
            else:
                total = total + F.cross_entropy(boml.plain_network(adapted, x_q), y_q, reduction="sum")
                if method == "bomla":
                    total = total + F.cross_entropy(boml.plain_network(theta, x_s), y_s, reduction="sum")
            m += 1
    total = total / m / (cfg.way * cfg.query)
    if method == "bomla":
        for name in boml.layers_of(theta):
            d = vec(theta, name) - vec(then, name)
            first = 1e-2 if name == "linear" else 1e-4
            total = total + 0.5 * d @ (dense_block(posterior.blocks[name]) + first * torch.eye(len(d))) @ d
    if method == "bomvi":
        normal = torch.distributions.Normal
        for n in theta:
            q = normal(theta[n], (posterior.logvar[n] / 2).exp())
            prior = normal(then[n], (then_logvar[n] / 2).exp() / math.sqrt(cfg.past_weight))
            total = total + torch.distributions.kl_divergence(q, prior).sum() * 0.01
    return total


@pytest.mark.parametrize("method", boml.METHODS)
@settings(max_examples=3)
@given(seed=seeds)
@doubles()
def test_step_is_the_gradient_of_the_whole_objective(method, seed):
    """What reaches the optimiser is the gradient of the objective written out plainly: two datasets with their own alpha
    and k in the meta-batch, a posterior that has absorbed twice, theta moved in place each time."""
    cfg = toy_config(meta_batch=3, way=3, shot=2, query=3, channels=1, past_weight=3.0, kl_weight=0.01,
                     initial_logvar=-3.0)  # wide: noise counts, and the KL does not drown the rest
    one = toy_data(seed, least=6, inner_rate=0.4, inner_steps=1)
    two = toy_data(seed + 1, least=6, inner_rate=0.1, inner_steps=3, eval_steps=7, name="cifar_fs")
    theta, posterior, then, then_logvar = moved_on(method, one, cfg)
    batch = [(one, boml.sample_tasks(one, "train", 1, cfg, torch.Generator().manual_seed(seed))),
             (two, boml.sample_tasks(two, "train", 2, cfg, torch.Generator().manual_seed(seed)))]
    noise = lambda m: torch.Generator().manual_seed(seed + m)
    optimiser = Still(posterior.parameters(theta))
    loss = boml.meta_step(theta, posterior, optimiser, batch, cfg, noise)
    expected = plain_objective(method, theta, posterior, then, then_logvar, batch, cfg, noise)
    assert_close(loss, expected, rtol=1e-7)
    params = [p for group in optimiser.param_groups for p in group["params"]]
    for p, e in zip(params, torch.autograd.grad(expected, params)):
        assert_close(p.grad, e, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", ["bomla", "bomvi"])
@pytest.mark.parametrize("shot, query", [(1, 3), (2, 1), (3, 2)])
@doubles()
def test_objective_is_the_papers_per_query_image(method, shot, query):
    """With one task the objective times the number of query images is Eq. 8, or with --kl-weight paper Eq. 14, at any shot
    and query: log-likelihoods summed over all images; BomVI's plus the whole KL, BomLA's penalty is per query image."""
    cfg = toy_config(meta_batch=1, way=3, shot=shot, query=query, channels=1, past_weight=1.0, kl_weight="paper")
    data = toy_data(1, least=5, inner_rate=0.4, inner_steps=2)
    theta, posterior, then, then_logvar = moved_on(method, data, cfg)
    index, noise = boml.sample_tasks(data, "train", 1, cfg, boml.stream("cpu")), lambda m: boml.stream("cpu", m)
    loss = boml.meta_step(theta, posterior, Still(posterior.parameters(theta)), [(data, index)], cfg, noise)
    x_s, y_s, x_q, y_q = (part[0] for part in boml.fetch(data, index, cfg))
    rng, S = noise(0), cfg.mc_samples if method == "bomvi" else 1

    def log_likelihood(p, x, y):
        logits = plain_noisy(p, posterior.logvar, x, rng) if method == "bomvi" else boml.plain_network(p, x)
        return sum(logits[b].log_softmax(0)[y[b]] for b in range(len(y)))

    adapted = plain_adapted(theta, x_s, y_s, 0.4, 2)
    total = -sum(log_likelihood(adapted, x_q, y_q) for _ in range(S)) / S
    total = total - sum(log_likelihood(theta, x_s, y_s) for _ in range(S)) / S
    if method == "bomvi":
        for n in theta:
            q, prior = (torch.distributions.Normal(m[n], (l[n] / 2).exp()) for m, l in (
                (theta, posterior.logvar), (then, then_logvar)))
            total = total + torch.distributions.kl_divergence(q, prior).sum()
    else:
        total = total + 3 * query * posterior.penalty(theta)[0]
    assert_close(3 * query * loss, total, rtol=1e-7)


@given(seeds, st.sampled_from([1e-5, 1e-2, 1.0]), st.sampled_from([1.0, 100.0]))
@doubles()
def test_variational_prior_pulls_like_laplace(seed, weight, past_weight):
    """On a quadratic loss with curvature h, where both are exact, BomVI's optimum has the variance weight/h, and so its
    next prior pulls as BomLA's with the same lambda and a diagonal curvature does, whatever the KL's weight."""
    g = torch.Generator().manual_seed(seed)
    h = {n: 0.5 + torch.rand(4, generator=g) for n in ("norm1.weight", "norm1.bias")}
    theta, moved = (boml.leaves({n: torch.randn(4, generator=g) for n in h}) for _ in range(2))
    cfg = toy_config(kl_weight=weight, past_weight=past_weight, first_variance=1e6)  # a flat first prior
    bomvi, bomla = boml.Variational(cfg, theta), boml.Laplace(cfg, theta)
    bomvi.logvar = boml.leaves({n: (weight / h[n]).log() for n in h})
    for n, slope in zip(h, bomvi.penalty(theta)[1][2:]):  # the expected loss is 1/2 h variance at its optimal mean
        assert_close(slope + h[n] / 2 * bomvi.logvar[n].exp(), torch.zeros(4), atol=1e-5 * weight)
    bomvi.absorb(theta, None, None)
    bomla.mean = theta
    bomla.blocks["norm1"] = (past_weight * torch.diag_embed(torch.stack(list(h.values()), -1)),)
    for n, one, other in zip(h, bomvi.penalty(moved)[1], bomla.penalty(moved)[1]):
        assert_close(one, other - 1e-4 * (moved[n] - theta[n]))  # less the pull of Lambda_0


@settings(max_examples=5)
@given(seeds)
@doubles()
def test_norm_blocks_are_the_joint_fisher(seed):
    """Batch norm's blocks, their mean over all draws of labels, are those of the exact Fisher of the whole batch, through
    every later norm layer."""
    cfg, g, B = toy_config(way=2, filters=3, channels=1), torch.Generator().manual_seed(seed), 3
    theta = boml.init_params(cfg, g)
    wander(theta, seed)
    x = torch.rand(1, B, 1, 28, 28, generator=g)
    logits = boml.plain_network(theta, x[0])
    log = logits.log_softmax(-1)
    found, exact = {}, {}
    for labels in np.ndindex(*[2] * B):
        y = torch.tensor(labels)
        weight = log.gather(1, y[:, None]).sum().exp().item()
        blocks = boml.fisher_blocks(boml.leaves(boml.spread(theta, 1)), x, (y * 1.0)[None] * (1 - 1e-12), False)
        for i in range(1, 5):
            names = [f"norm{i}.weight", f"norm{i}.bias"]
            grads = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), [theta[n] for n in names], retain_graph=True)
            v = torch.stack(grads, -1)  # (C, 2)
            exact[i] = exact.get(i, 0) + weight * v[..., None] * v[..., None, :] / B
            found[i] = found.get(i, 0) + weight * blocks[f"norm{i}"][0][0]
    for i in exact:
        assert_close(found[i], exact[i], rtol=1e-7, atol=1e-12)


def nearest_product(whole, P, O):
    """The matrix A (x) G nearest to a whole one, by the SVD of Van Loan's rearrangement."""
    U, S, V = torch.linalg.svd(whole.view(P, O, P, O).permute(0, 2, 1, 3).reshape(P * P, O * O), full_matrices=False)
    return (S[0] * torch.outer(U[:, 0], V[0])).view(P, P, O, O).permute(0, 2, 1, 3).reshape(P * O, P * O)


@pytest.mark.parametrize("jacobian_rate", [None, 1.0])
@doubles()
def test_absorbing_is_the_curvature_computed_directly(jacobian_rate):
    """What each stage adds to the precision: lambda times the curvature of tasks of its training classes, with k of
    training, its own alpha in adaptation and, unless another rate is given, Jacobian, and an own uniform number for
    each image; the sum is merged to one pair."""
    cfg = toy_config(way=3, channels=1, shot=1, query=3, hessian_tasks=3, past_weight=7.0, jacobian_rate=jacobian_rate)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    posterior, expected = boml.Laplace(cfg, theta), {}
    for stage, (alpha, k) in enumerate(((0.3, 2), (0.2, 1))):
        data = toy_data(stage, inner_rate=alpha, inner_steps=k, eval_steps=5, name="cifar_fs")
        wander(theta, stage)
        posterior.absorb(theta, data, torch.Generator().manual_seed(stage))
        rng, a = torch.Generator().manual_seed(stage), jacobian_rate or alpha
        index = boml.sample_tasks(data, "train", 3, cfg, rng)
        u_s, u_q = torch.rand(3, 3, generator=rng), torch.rand(3, 9, generator=rng)
        sums = {}
        for m, (x_s, y_s, x_q, y_q) in enumerate(zip(*boml.fetch(data, index, cfg))):
            adapted = plain_adapted(theta, x_s, y_s, alpha, k)
            for side, (p, x, u) in enumerate(((theta, x_s, u_s[m]), (adapted, x_q, u_q[m]))):
                for name, factors in plain_factors(p, x, u).items():
                    for f, factor in enumerate(factors):
                        sums[name, side, f] = sums.get((name, side, f), 0) + factor / 3
        for name in boml.layers_of(theta):
            if name.startswith("norm"):
                J = torch.eye(2) - a * sums[name, 0, 0]
                expected[name] = expected.get(name, 0) + 7 * J @ sums[name, 1, 0] @ J.mT
                assert_close(posterior.blocks[name][0], expected[name], rtol=1e-6, atol=1e-12)
                continue
            (A, G), (A_q, G_q) = ([sums[name, side, f] for f in (0, 1)] for side in (0, 1))
            J = torch.eye(len(A) * len(G)) - a * torch.kron(A, G)
            whole = expected.get(name, 0) + 7 * J @ torch.kron(A_q, G_q) @ J.T
            expected[name] = nearest_product(whole, len(A), len(G))
            assert len(posterior.blocks[name][0]) == 1
            found, tiny_part = dense_block(posterior.blocks[name]), 1e-9 * float(whole.norm())
            assert_close(found, expected[name], rtol=1e-5, atol=tiny_part)


# -------------------------------------------------------------------------------------------- Assembly: a spy on a run


def spied_run(method, tmp_path, monkeypatch, seed=0, cfg=None, iterations=(4, 10, 5)):
    """What happened at every outer update of a run over three datasets, and at every absorbing."""
    cfg = cfg or toy_config(meta_batch=3, eval_every=100, way=3)
    names = ("omniglot", "vgg_flowers", "cifar_fs")
    sequence = [toy_data(j, name=n, iterations=J, inner_steps=1) for j, (n, J) in enumerate(zip(names, iterations))]
    steps, absorbed = [], []
    real_step, kind = boml.meta_step, boml.METHODS[method].posterior
    real_absorb = kind.absorb
    tmp_path.mkdir(parents=True, exist_ok=True)

    def step(theta, posterior, optimiser, batch, cfg, noise):
        before = {n: v.detach().clone() for n, v in theta.items()}
        loss = real_step(theta, posterior, optimiser, batch, cfg, noise)
        moved = [optimiser.state[p]["step"].item() for g in optimiser.param_groups for p in g["params"]]
        steps.append(SimpleNamespace(
            stage=run.stage, i=run.iteration, batch=batch, before=before, after={n: v.detach().clone() for n, v in theta.items()},
            grads={n: v.grad.clone() for n, v in theta.items()},
            rates=[g["lr"] for g in optimiser.param_groups], kind=type(optimiser), counts=set(moved), noise=[noise(m).initial_seed() for m in range(3)]))
        return loss

    def absorb(self, theta, data, rng):
        absorbed.append((data.name, {n: v.detach().clone() for n, v in theta.items()}, rng.initial_seed()))
        return real_absorb(self, theta, data, rng)

    monkeypatch.setattr(boml, "meta_step", step)
    monkeypatch.setattr(kind, "absorb", absorb)
    job = boml.Job(method, method, seed, cfg)
    facts = dict(experiment="triathlon", schedule="cpu", data="real", way=cfg.way, settings="", revision="",
                 start_from="")
    run = boml.Run(job, sequence, sequence, facts, tmp_path, lambda share: False)
    run.resume()
    assert run.go()
    monkeypatch.undo()
    return sequence, steps, absorbed, cfg


def classes_of(data, index):
    """The classes of sampled images."""
    owner = {int(i): c for c, row in enumerate(data.rows.tolist()) for i in row if i >= 0}
    return {owner[int(i)] for i in index.flatten()}


@pytest.mark.parametrize("method", boml.METHODS)
def test_every_task_is_of_training_classes(method, tmp_path, monkeypatch):
    """Meta-training never sees an image of a validation or test class, whatever the source of its tasks."""
    _, steps, _, _ = spied_run(method, tmp_path, monkeypatch)
    for step in steps:
        for data, index in step.batch:
            assert classes_of(data, index) <= set(data.splits["train"].tolist())


@pytest.mark.parametrize("method", ["maml", "bomla", "bomvi"])
def test_newest_dataset_alone_is_trained_on(method, tmp_path, monkeypatch):
    """Sequential MAML, BomLA and BomVI take M tasks of the newest dataset for J iterations, other ones every time."""
    sequence, steps, _, cfg = spied_run(method, tmp_path, monkeypatch)
    assert [step.stage for step in steps] == [0] * 4 + [1] * 10 + [2] * 5
    assert all([(d.name, len(i)) for d, i in step.batch] == [(sequence[step.stage].name, cfg.meta_batch)] for step in steps)
    assert len({tuple(step.batch[0][1].flatten().tolist()) for step in steps}) == len(steps)


def test_everything_is_trained_on_evenly(tmp_path, monkeypatch):
    """Train-On-Everything gives each dataset so far its equal share of a stage as long as all stages so far together,
    and draws new tasks every time."""
    _, steps, _, _ = spied_run("toe", tmp_path, monkeypatch)
    tasks = [(d.name, *task.flatten().tolist()) for step in steps for d, index in step.batch for task in index]
    assert len(set(tasks)) == len(tasks)
    for stage, J in enumerate((4, 14, 19)):
        mine = [step for step in steps if step.stage == stage]
        seen = Counter(d.name for step in mine for d, index in step.batch for _ in index)
        assert len(mine) == J and len(seen) == stage + 1
        assert max(seen.values()) - min(seen.values()) <= 1 and sum(seen.values()) == 3 * J


def test_buffer_holds_all_tasks_so_far(tmp_path, monkeypatch):
    """Follow-The-Meta-Leader draws uniformly from J M tasks of each dataset so far, the newest one's from the start, and
    from no others: drawn often enough, each dataset shows just its J M different tasks."""
    sequence, steps, _, cfg = spied_run("ftml", tmp_path, monkeypatch)
    assert [step.stage for step in steps] == [0] * 4 + [1] * 10 + [2] * 5
    seen = {d.name: Counter() for d in sequence}
    for i in range(2000):
        for data, index in boml.from_buffer(sequence, i, cfg, 0):
            seen[data.name].update(str(task.tolist()) for task in index)
    for data in sequence:
        assert len(seen[data.name]) == data.setting.iterations * cfg.meta_batch
    counts = np.array([n for counter in seen.values() for n in counter.values()])
    assert abs(counts / 6000 - 1 / 57).max() < 6 * (1 / 57 / 6000) ** 0.5
    for stage in range(3):
        mine = [(d.name, str(t.tolist())) for s in steps if s.stage == stage for d, index in s.batch for t in index]
        assert {name for name, _ in mine} == {d.name for d in sequence[: stage + 1]}
        assert all(task in seen[name] for name, task in mine)


@pytest.mark.parametrize("method", boml.METHODS)
def test_rates_follow_table_2(method, tmp_path, monkeypatch):
    """Adam's rate is 0.001, never falls for Omniglot, falls to a tenth at every fifth of Flowers and halfway of CIFAR-FS, but
    never for BomVI, whose log-variances have a rate of their own."""
    cfg = toy_config(meta_batch=3, eval_every=100, way=3, logvar_rate=0.005)
    _, steps, _, _ = spied_run(method, tmp_path, monkeypatch, cfg=cfg)
    for step in steps:
        assert step.kind is torch.optim.Adam
        J = {"toe": (4, 14, 19)}.get(method, (4, 10, 5))[step.stage]
        share = step.i / J
        falls = (0, sum(share >= f for f in (0.2, 0.4, 0.6, 0.8)), share >= 0.5)[step.stage] if method != "bomvi" else 0
        expected = [0.001 * 0.1**falls] + [0.005] * (method == "bomvi")
        assert_close(step.rates, expected)


@pytest.mark.parametrize("method", boml.METHODS)
def test_optimiser_is_new_at_every_stage(method, tmp_path, monkeypatch):
    """Each stage begins with a new Adam, which then counts its updates; each update is Adam's as it was published."""
    _, steps, _, _ = spied_run(method, tmp_path, monkeypatch)
    assert all(step.counts == {step.i + 1} for step in steps)
    one, two = {}, {}
    for step in steps:
        for n, g in step.grads.items():
            m, v = (moments[n] for moments in (one, two)) if step.i else (0.0, 0.0)
            one[n], two[n] = m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            m, v = m / (1 - 0.9 ** (step.i + 1)), v / (1 - 0.999 ** (step.i + 1))
            assert_close(step.after[n], step.before[n] - step.rates[0] * m / (v.sqrt() + 1e-8), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("method", boml.METHODS)
def test_stage_starts_where_the_last_ended(method, tmp_path, monkeypatch):
    """Each update starts from the parameters that the last one left, also over the ends of stages; only Train-On-Everything
    starts every stage from new random ones."""
    _, steps, _, cfg = spied_run(method, tmp_path, monkeypatch)
    for one, two in zip(steps, steps[1:]):
        same = all(torch.equal(one.after[n], two.before[n]) for n in one.after)
        assert same == (method != "toe" or one.stage == two.stage)
    if method == "toe":
        starts = [step.before["conv1.weight"] for step in steps if step.i == 0]
        assert all(abs(s).max() <= 1 / (9 * cfg.channels) ** 0.5 for s in starts)  # fresh, not trained
        assert not torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


@pytest.mark.parametrize("method", boml.METHODS)
def test_seeds_start_apart(method, tmp_path, monkeypatch):
    """Another seed has another start, other tasks, other noise, and other tasks for its curvature at every stage."""
    runs = [spied_run(method, tmp_path / str(seed), monkeypatch, seed, iterations=(1, 1, 1)) for seed in (0, 1)]
    one, two = (steps[0] for _, steps, _, _ in runs)
    assert not torch.equal(one.before["conv1.weight"], two.before["conv1.weight"])
    tasks = [{(d.name, str(t.tolist())) for step in steps for d, index in step.batch for t in index}
             for _, steps, _, _ in runs]
    assert not tasks[0] & tasks[1]
    assert not set(one.noise) & set(two.noise)
    assert len({seed for _, _, absorbed, _ in runs for _, _, seed in absorbed}) == 6


def test_noise_is_never_the_same(tmp_path, monkeypatch):
    """Every task of every meta-batch of every stage has noise of its own."""
    _, steps, _, _ = spied_run("bomvi", tmp_path, monkeypatch)
    noise = [n for step in steps for n in step.noise]
    assert len(set(noise)) == len(noise) == 3 * 19


@pytest.mark.parametrize("method", boml.METHODS)
def test_each_dataset_is_absorbed_when_it_is_learned(method, tmp_path, monkeypatch):
    """At the end of each stage its own dataset is absorbed, once, at the parameters just reached."""
    sequence, steps, absorbed, _ = spied_run(method, tmp_path, monkeypatch)
    assert [name for name, _, _ in absorbed] == [d.name for d in sequence]
    ends = [max((s for s in steps if s.stage == stage), key=lambda s: s.i).after for stage in range(3)]
    for (_, at, _), end in zip(absorbed, ends):
        assert all(torch.equal(at[n], end[n]) for n in end)


def test_rows_are_of_the_dataset_that_they_name(tmp_path):
    """A row of the record has the scores of the dataset that it names, evaluated with that one's own alpha and k."""
    sequence = [toy_data(0, iterations=2), toy_data(1, iterations=2, name="cifar_fs", eval_steps=4)]
    cfg = toy_config(way=3, eval_tasks=4)
    run = new_run(tmp_path, "maml", cfg, sequence)
    run.resume()
    assert run.go()
    rows = {row["evaluated"]: row for row in rows_of(tmp_path / "record.jsonl")}  # the last of each dataset
    for data in sequence:
        scores = boml.evaluate(run.theta, run.posterior, data, cfg, 0)
        assert {key: rows[data.name][key] for key in scores} == scores


# -------------------------------------------------------------------------------------------- Assembly: the tables

TABLE_1 = dict(hessian_tasks=5000, mc_samples=20, meta_batch=32, query=15, outer_rate=0.001, eval_tasks=100)
TABLE_2 = {  # k, alpha, decay, k in meta-evaluation
    "omniglot": (1, 0.4, (), 3), "mini_quickdraw": (3, 0.2, (0.5,), 5), "cifar_fs": (5, 0.1, (0.5,), 10),
    "mini_imagenet": (5, 0.1, (0.5,), 10), "vgg_flowers": (5, 0.1, (0.2, 0.4, 0.6, 0.8), 10),
    "aircraft": (5, 0.1, (0.5,), 10)}
SEQUENCES = {"triathlon": ["omniglot", "mini_quickdraw", "cifar_fs"],
             "pentathlon": ["omniglot", "cifar_fs", "mini_imagenet", "vgg_flowers", "aircraft"]}


@pytest.mark.parametrize("experiment", SEQUENCES)
def test_paper_schedule_is_tables_1_and_2(experiment):
    """On the paper schedule the N-athlons have the hyperparameters of Tables 1 and 2, 5-way 1-shot, and 64 filters."""
    args, *others = runs_of(experiment, "--schedule", "paper", "--device", "cpu")
    cfg, weights = args.job.cfg, {each.method: each.job.cfg.past_weight for each in others}
    assert [name for name, _ in args.sequence] == SEQUENCES[experiment]
    assert {k: getattr(cfg, k) for k in TABLE_1} == TABLE_1
    assert (cfg.way, cfg.shot, cfg.filters, cfg.channels) == (5, 1, 64, 3)
    for name, s in args.sequence:
        assert (s.inner_steps, s.inner_rate, s.decay, s.eval_steps, s.iterations) == (*TABLE_2[name], 5000)
    assert (weights["bomla"], weights["bomvi"]) == (100.0, 1.0)


def test_paper_schedule_is_table_3():
    """On the paper schedule the Omniglot sequence has the hyperparameters of Table 3, 5-way 5-shot, on grey images."""
    args = boml.parse(["omniglot", "--schedule", "paper", "--device", "cpu", "--method", "bomla"])
    cfg, [(name, s)] = args.job.cfg, args.sequence
    assert name == "omniglot_alphabets" and s.iterations == 50
    assert (cfg.way, cfg.shot, cfg.query, cfg.channels, cfg.filters) == (5, 5, 15, 1, 64)
    assert (cfg.meta_batch, cfg.mc_samples, cfg.outer_rate, cfg.eval_tasks, cfg.initial_logvar) == (1, 5, 0.001, 100, -10.0)
    assert (cfg.hessian_tasks, cfg.tasks) == (1, 230)  # the authors' 254 tasks less 24 incomplete ones
    assert (s.inner_steps, s.inner_rate, s.decay, s.eval_steps, s.rotate) == (5, 0.1, (), 10, False)
    assert cfg.past_weight == 0.01


@pytest.mark.parametrize("schedule", ["long", "cpu"])
@pytest.mark.parametrize("experiment", SEQUENCES)
def test_shorter_schedules_keep_the_rest_of_the_tables(schedule, experiment):
    """The long and the cpu schedule change only sizes and counts: no rate, no k, no decay, not the network, not lambda."""
    args = boml.parse([experiment, "--schedule", schedule, "--device", "cpu"])
    changed = {f.name for f in dataclasses.fields(boml.Config) if getattr(args.job.cfg, f.name) != f.default}
    assert changed <= {"query", "meta_batch", "eval_every", "hessian_tasks", "mc_samples", "logvar_rate"}
    for name, s in args.sequence:
        assert s._replace(iterations=5000) == boml.DATASETS[name] and (schedule == "cpu" or s.iterations == 5000)


@pytest.mark.parametrize("command, expected", [
    ("triathlon --sequence omniglot", (300, 230)), ("pentathlon --sequence omniglot", (150, 230)),
    ("omniglot --sequence generated_alphabets", (20, 40))])
def test_cpu_schedule_of_another_sequence(command, expected):
    """An experiment's short schedule holds for another sequence too, but for iterations that are one for each dataset."""
    args = boml.parse([*command.split(), "--schedule", "cpu"])
    assert (args.sequence[0][1].iterations, args.job.cfg.tasks) == expected


def test_defaults():
    """Without options BomLA averages factors at the dataset's alpha, drawn labels, one pair; BomVI has the authors' KL."""
    cfg = boml.Config()
    assert (cfg.averaging, cfg.jacobian_rate, cfg.merge_rank, cfg.exact_labels, cfg.support_hessian) == ("averages", None, 1, False, False)
    assert (cfg.first_variance, cfg.kl_weight, cfg.split) == (1.0, "authors", "test")
    assert (cfg.past_weight, cfg.logvar_rate, cfg.eval_every) == (100.0, 0.001, 500)


def test_initialisation():
    """Weights are uniform in +-1/sqrt(fan-in), biases zero, batch norm's scales one; the precision's mean starts at zero."""
    cfg = boml.Config()
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    for name, v in theta.items():
        if v.dim() > 1:
            bound = 1 / math.prod(v.shape[1:]) ** 0.5
            assert 0.97 * bound < v.abs().max() <= bound and abs(v.std() / bound - 3**-0.5) < 0.05, name
        else:
            assert (v == (1.0 if name.startswith("norm") and name.endswith("weight") else 0.0)).all(), name
    assert all((v == 0).all() for v in boml.Laplace(cfg, theta).mean.values())
    variational = boml.Variational(cfg, theta)
    assert all((v == -10).all() for v in variational.logvar.values())
    assert all((variational.prior_mean[n] == v).all() for n, v in theta.items())
    assert all((v == 0).all() for v in variational.prior_logvar.values())


# -------------------------------------------------------------------------------------------- Assembly: the Omniglot sequence

TRAINING_ALPHABETS = """Alphabet_of_the_Magi Angelic Armenian Asomtavruli_(Georgian) Atlantean Aurek-Besh Avesta Balinese
Bengali Braille Burmese_(Myanmar) Early_Aramaic Grantha Gujarati Gurmukhi Hebrew Inuktitut_(Canadian_Aboriginal_Syllabics)
Japanese_(hiragana) Japanese_(katakana) Kannada Keble Korean Latin Malayalam Malay_(Jawi_-_Arabic) Manipuri Mongolian
Ojibwe_(Canadian_Aboriginal_Syllabics) Old_Church_Slavonic_(Cyrillic) Oriya Sanskrit Sylheti Tengwar Tifinagh ULOG""".split()
TEST_ALPHABETS = """Atemayar_Qelisayer Futurama Greek Mkhedruli_(Georgian) Syriac_(Estrangelo) Syriac_(Serto) Tagalog
Tibetan""".split()
VALIDATION_ALPHABETS = """Anglo-Saxon_Futhorc Arcadian Blackfoot_(Canadian_Aboriginal_Syllabics) Cyrillic Ge_ez Glagolitic
N_Ko""".split()


def alphabets_data(tmp_path, each=6):
    """A packed file like Omniglot by alphabets: its 50 alphabets, of a few characters each."""
    names = sorted(TRAINING_ALPHABETS + TEST_ALPHABETS + VALIDATION_ALPHABETS)
    classes = [f"{a}/character{c:02d}" for a in names for c in range(1, each + 1)]
    labels = np.repeat(np.arange(len(classes)), 12)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    split = data_prep.split_of("omniglot_alphabets", classes)
    np.savez(tmp_path / "omniglot_alphabets.npz", images=images, labels=labels, classes=classes, split=split, origin=["real"])
    return load("omniglot_alphabets", tmp_path)


def test_task_sequence_by_alphabet(tmp_path):
    """Tasks come from the paper's 35 training alphabets, a task from one of them; evaluation from its 8 test alphabets, and
    from its 7 for validation if asked to."""
    data = alphabets_data(tmp_path)
    cfg = toy_config(shot=5, query=5, channels=1)
    tasks, judge = boml.task_sequence(data, cfg, 0)
    of = lambda classes: {data.classes[c].split("/")[0] for c in classes.tolist()}
    assert sorted(a for task in tasks for a in of(task.splits["train"])) == sorted(TRAINING_ALPHABETS)
    assert of(judge.splits["test"]) == set(TEST_ALPHABETS) and of(judge.splits["val"]) == set(VALIDATION_ALPHABETS)


def test_task_sequence_is_shuffled_by_the_seed(tmp_path):
    """The order of the alphabets and the characters of their tasks depend on the seed, and on nothing else."""
    data = alphabets_data(tmp_path, each=12)
    cfg = toy_config(shot=5, query=5, channels=1)
    first, again, other = ([(t.name, t.splits["train"].tolist()) for t in boml.task_sequence(data, cfg, s)[0]] for s in (0, 0, 1))
    assert first == again and [n for n, _ in first] != [n for n, _ in other] != sorted(n for n, _ in other)
    assert any(c != sorted(c) for _, c in first) and dict(first)["Latin 1"] != dict(other)["Latin 1"]


def test_seed_of_a_run_orders_its_tasks(fake_data, tmp_path, monkeypatch):
    """Runs of the Omniglot sequence with different seeds meet different tasks, or the same ones in another order."""
    line = f"omniglot --methods maml --seeds 0,1 --shot 1 --query 2 --data {fake_data} --out {tmp_path}"
    met = []
    characters = lambda run: [task.splits["train"].tolist() for task in run.sequence]
    monkeypatch.setattr(boml.Run, "go", lambda run: met.append(characters(run)))
    for args in runs_of(*line.split()):
        boml.work(args, None)
    assert len(met) == 2 and met[0] != met[1]


# -------------------------------------------------------------------------------------------- Assembly: prediction and scores


@doubles()
def test_bomvi_predicts_the_mean_of_probabilities():
    """Over samples BomVI predicts the mean of the probabilities that networks with its variance give."""
    cfg = toy_config(way=3, channels=1, mc_samples=3)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    posterior = boml.Variational(cfg, theta)
    for v in posterior.logvar.values():
        v.data.fill_(-3.0)
    x = torch.rand(1, 6, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    found = posterior.predict(boml.spread(theta, 1), x, [torch.Generator().manual_seed(2)])
    rng = torch.Generator().manual_seed(2)
    expected = sum(plain_noisy(theta, posterior.logvar, x[0], rng).softmax(-1) for _ in range(3)) / 3
    assert_close(found["sampled_"].exp()[0], expected, rtol=1e-7)
    assert_close(found[""].exp()[0], boml.plain_network(theta, x[0]).softmax(-1), rtol=1e-7)


@doubles()
def test_scores_are_those_of_a_plain_loop():
    """Accuracy, its interval over tasks and the negative log-likelihood of the true labels are those of a plain loop over
    the same tasks, with the dataset's own alpha and steps for evaluation."""
    cfg = toy_config(way=3, channels=1, eval_tasks=6)
    data = toy_data(1, inner_rate=0.3, inner_steps=1, eval_steps=4, name="cifar_fs")
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    wander(theta, 1)
    found = boml.evaluate(theta, boml.Posterior(cfg, theta), data, cfg, 5)
    index = boml.sample_tasks(data, "test", 6, cfg, boml.stream("cpu", 5, "evaluate", data.name))
    right, nll = [], []
    for x_s, y_s, x_q, y_q in zip(*boml.fetch(data, index, cfg)):
        logits = boml.plain_network(plain_adapted(theta, x_s, y_s, 0.3, 4), x_q)
        right.append((logits.argmax(-1) == y_q).double().mean().item())
        nll.append(F.cross_entropy(logits, y_q).item())
    assert_close([found["accuracy"], found["nll"]], [np.mean(right), np.mean(nll)], rtol=1e-7)
    assert_close(found["ci95"], 1.96 * np.std(right, ddof=1) / 6**0.5)


# -------------------------------------------------------------------------------------------- Assembly: the path of a GPU


@pytest.mark.parametrize("method", ["maml", "bomla", "bomvi"])
@doubles()
def test_all_tasks_in_one_chunk(method, monkeypatch):
    """All tasks at once, as on a GPU, give the step, the absorbed curvature and the scores of one task after the other."""
    cfg, data = toy_config(meta_batch=3, way=3, channels=1, eval_tasks=3), toy_data(0)
    found = []
    for chunks in (boml.chunks, lambda T, device: [slice(0, T)]):
        monkeypatch.setattr(boml, "chunks", chunks)
        theta, posterior, *_ = moved_on(method, data, cfg)
        batch = [(data, boml.sample_tasks(data, "train", 3, cfg, torch.Generator().manual_seed(0)))]
        optimiser = Still(posterior.parameters(theta))
        loss = boml.meta_step(theta, posterior, optimiser, batch, cfg, lambda m: torch.Generator().manual_seed(m))
        scores = boml.evaluate(theta, posterior, data, cfg, 0)
        grads = torch.cat([p.grad.flatten() for g in optimiser.param_groups for p in g["params"]])
        blocks = [f.flatten() for block in getattr(posterior, "blocks", {}).values() for f in block]
        found.append((loss, grads, torch.cat([torch.zeros(1), *blocks]), torch.tensor(list(scores.values()))))
    for one, all_at_once in zip(*found):
        assert_close(all_at_once, one, rtol=1e-6, atol=1e-9)


class Pretend(torch.Tensor):
    """A tensor of a pretend GPU: on another device for torch, its values on the host. Mixing devices fails; while
    `strict`, so does copying between them or waiting for a value."""

    __torch_function__, __repr__, strict = torch._C._disabled_torch_function_impl, object.__repr__, False

    def __new__(cls, host):
        layout = dict(strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype)
        self = torch.Tensor._make_wrapper_subclass(cls, host.shape, **layout, device="pretend:0")
        self.host = host
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, aten, tag = kwargs or {}, torch.ops.aten, torch.Tag
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        ours = [t for t in tensors if isinstance(t, cls)]
        mixed = ours and any(t.dim() for t in tensors if not isinstance(t, cls))  # a number goes with any device
        here = kwargs["device"].type == "pretend" if kwargs.get("device") else bool(ours)
        waits = ours and {tag.data_dependent_output, tag.dynamic_output_shape} & {*func.tags}
        if func in (aten.copy_.default, aten._to_copy.default):
            here = isinstance(args[0], cls) if func is aten.copy_.default else here
            waits = any(isinstance(t, cls) != here for t in tensors)
        elif func is aten.index.Tensor and isinstance(args[0], cls):  # CUDA takes an index on the host, and copies it
            waits = mixed or any(t.dtype == torch.bool for t in tensors[1:])
        else:
            assert not mixed, f"{func} mixes devices"
        assert not (cls.strict and waits), f"{func} copies or waits in a training step"
        bare = lambda a: a.host if isinstance(a, cls) else torch.device("cpu") if isinstance(a, torch.device) else a
        out, known = func(*tree_map(bare, args), **tree_map(bare, kwargs)), {id(t.host): t for t in ours}
        return tree_map_only(torch.Tensor, lambda a: known.get(id(a), cls(a)), out) if here else out


class DeviceGenerator(torch.Generator):
    """A device's generator, with the host's numbers."""

    made_for = {}  # the device by seed: operations see a copy without attributes

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.kind = torch.device(device).type
        return self

    def manual_seed(self, seed):
        self.made_for[seed] = self.kind
        return super().manual_seed(seed)


class OtherDevice(TorchDispatchMode):
    """While entered, the pretend GPU works, or a real one draws the host's numbers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if rng := kwargs.get("generator"):
            device = kwargs.get("device") or args[0].device
            assert DeviceGenerator.made_for[rng.initial_seed()] == device.type, f"{func} mixes devices"
        if self.kind == "pretend":
            return Pretend.__torch_dispatch__(func, types, args, kwargs)
        if not rng or device.type == "cpu":
            return func(*args, **kwargs)
        if func is torch.ops.aten.normal_.default:  # in a training step: copied without waiting
            return args[0].copy_(torch.randn(args[0].shape, generator=rng).pin_memory(), non_blocking=True)
        return func(*args, **kwargs | {"device": torch.device("cpu")}).to(device)


@contextlib.contextmanager
def no_waits(kind):
    Pretend.strict = True
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        Pretend.strict = False
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def moved(x, device):
    """Datasets or states, tensor by tensor."""
    return tree_map_only(torch.Tensor, lambda a: a.detach().to(device).requires_grad_(a.requires_grad), x)


def values_on(kind, method, out):
    """The nlls and tensors that a run leaves; off the CPU it is stopped in its second stage and resumed."""
    with contextlib.ExitStack() as stack:
        if kind != "cpu":
            patch, save, load = stack.enter_context(pytest.MonkeyPatch.context()), torch.save, torch.load
            patch.setattr(boml, "meta_step", no_waits(kind)(boml.meta_step))
            patch.setattr(torch, "Generator", DeviceGenerator)
            stack.enter_context(OtherDevice(kind))
        if kind == "pretend":  # its tensors are saved as the host's; new_tensor does not reach the mode
            patch.setattr(torch, "save", lambda state, file: save(moved(state, "cpu"), file))
            patch.setattr(torch, "load", lambda file, map_location="cpu", **how: moved(load(file, **how), map_location))
            patch.setattr(torch.Tensor, "new_tensor", lambda x, data: torch.tensor(data, dtype=x.dtype).to(x.device))
        second = toy_data(1, channels=3, name="mini_quickdraw", iterations=2, inner_steps=2)
        sequence = [moved(d, kind) for d in (toy_data(0, iterations=1), second)]
        go = functools.partial(toy_run, out, method, toy_config(meta_batch=3), sequence=sequence, device=kind)
        stop = iter([False, True])
        assert (kind == "cpu" or not go(lambda share: next(stop))) and go()
        tensors = [v.detach().cpu() for v in flat(state_of(out)) if isinstance(v, torch.Tensor)]
    return [torch.tensor([row["nll"] for row in rows_of(out / "record.jsonl")]), *tensors]


@doubles()
def compare_with_cpu(kind):
    """Prints what goes wrong with each method. In a process of its own: a device is registered for good."""
    if kind == "pretend":
        _setup_privateuseone_for_python_backend(kind)
    failures = dict.fromkeys(boml.METHODS, "")
    for method in failures:
        try:
            with tempfile.TemporaryDirectory() as folder:
                ours, cpu = (values_on(device, method, Path(folder, device)) for device in (kind, "cpu"))
            assert len(ours) == len(cpu)
            for a, b in zip(ours, cpu):
                assert_close(a, b, rtol=1e-9, atol=1e-9)
        except Exception:
            failures[method] = traceback.format_exc()
    print(json.dumps(failures))


@functools.cache
def failures_on(kind):
    line = [sys.executable, "-c", f"import test_boml; test_boml.compare_with_cpu({kind!r})"]
    return json.loads(subprocess.run(line, cwd=HERE, stdout=subprocess.PIPE, check=True, text=True).stdout)


@pytest.mark.parametrize("kind", ["pretend"] + ["cuda"] * torch.cuda.is_available())
@pytest.mark.parametrize("method", boml.METHODS)
def test_other_device_equals_cpu(method, kind):
    """On another device a run, stopped and resumed, ends as an unbroken one on the CPU; no step of it copies or waits,
    and nothing mixes devices."""
    assert not (failure := failures_on(kind)[method]), failure


def test_values_for_each_dataset_arrive_in_order(tmp_path):
    """Of several values of --iterations, --inner-rate, --inner-steps and --eval-steps each dataset gets its own."""
    for j, name in enumerate(("omniglot", "cifar_fs")):
        labels = np.repeat(np.arange(30), 4)
        np.savez(tmp_path / f"{name}.npz", images=np.zeros((120, 28, 28), np.uint8), labels=labels, origin=["real"],
                 classes=[f"{j}/{c}" for c in range(30)], split=["train"] * 10 + ["val"] * 10 + ["test"] * 10)
    line = "run --sequence omniglot,cifar_fs --iterations 7,8 --inner-rate 0.5,0.6 --inner-steps 2,3 --eval-steps 4,5 --query 2"
    args = boml.parse([*line.split(), "--data", str(tmp_path)])
    one, two = boml.load_sequence(args)
    settings = [(s.iterations, s.inner_rate, s.inner_steps, s.eval_steps) for s in (one.setting, two.setting)]
    assert settings == [(7, 0.5, 2, 4), (8, 0.6, 3, 5)]


# ------------------------------------------------------------------------------------------------------- Runs


def test_plan_of_everything_is_even():
    """Train-On-Everything gives each dataset so far its equal share over the iterations."""
    arrived = [toy_data(0), toy_data(1, name="mini_quickdraw"), toy_data(2, name="cifar_fs")]
    total = Counter()
    for i in range(30):
        for data, index in boml.from_all(arrived, i, toy_config(meta_batch=4), 0):
            total[data.name] += len(index)
    assert total == {"omniglot": 40, "mini_quickdraw": 40, "cifar_fs": 40}


@pytest.mark.parametrize("method, expected", [("toe", [3, 7, 9]), ("maml", [3, 4, 2]), ("ftml", [3, 4, 2])])
def test_iterations_of_everything(method, expected, tmp_path):
    """Train-On-Everything trains for the iterations of all stages so far, others for those of the newest dataset."""
    sequence = [toy_data(iterations=n) for n in (3, 4, 2)]
    run = new_run(tmp_path, method, toy_config(), sequence)
    assert run.iterations == expected


def alphabets(seed, classes=65):
    """A dataset of alphabets of five characters, each alphabet in one split."""
    data = toy_data(seed, classes=classes)
    ends = [0, 7 * 5, 10 * 5, classes]
    return data._replace(splits={s: torch.arange(ends[n], ends[n + 1]) for n, s in enumerate(boml.SPLITS)})


def assert_tasks_are_apart(data, way, seed):
    """The tasks' characters, of which there is at least one task: no two the same, none that is evaluated on."""
    sequence, judge = boml.task_sequence(data, toy_config(way=way), seed)
    letters = [c for task in sequence for c in task.splits["train"].tolist()]
    assert len(letters) == len(sequence) * way > 0 and len(set(letters)) == len(letters)
    for split in ("val", "test"):
        assert not set(letters) & (set(data.splits[split].tolist()) | set(judge.splits[split].tolist()))
    return sequence


@given(seeds, st.integers(2, 5))
def test_task_sequence_shares_no_character(seed, way):
    """The tasks of the Omniglot sequence are of one alphabet each, have no character in common, and none that is
    evaluated on."""
    data = alphabets(seed)
    sequence = assert_tasks_are_apart(data, way, seed)
    assert len(sequence) == 7 * (5 // way)
    assert all(len({data.classes[c].split("/")[0] for c in task.splits["train"].tolist()}) == 1 for task in sequence)


def test_task_sequence_of_divided_alphabets_shares_no_character():
    """Where alphabets are divided between splits, the Omniglot sequence trains on no character that is evaluated on."""
    data, mixed = alphabets(0), torch.randperm(65, generator=torch.Generator().manual_seed(0))
    data = data._replace(splits={s: mixed[c] for s, c in data.splits.items()})
    assert_tasks_are_apart(data, 2, 0)


@given(seeds)
def test_unseen_alphabets_are_not_mixed(seed):
    """The characters of a task to evaluate on are distinct and of one alphabet."""
    data = alphabets(seed)
    _, judge = boml.task_sequence(data, toy_config(), seed)
    index = boml.sample_tasks(judge, "test", 20, toy_config(way=4), boml.stream("cpu", seed))
    owner = {image: c for c, row in enumerate(data.rows.tolist()) for image in row if image >= 0}
    for task in index[..., 0].tolist():
        c = [owner[image] for image in task]
        assert len(set(c)) == 4 and len({n // 5 for n in c}) == 1 and min(c) >= 50


def test_buffer_is_sampled_uniformly():
    """Follow-The-Meta-Leader draws from J M tasks of each dataset that has arrived, each about equally often, and from
    no others."""
    arrived = [toy_data(0, iterations=4), toy_data(1, iterations=2, name="mini_quickdraw")]
    seen = Counter()
    for i in range(400):
        for data, index in boml.from_buffer(arrived, i, toy_config(meta_batch=5), 0):
            seen.update((data.name, *row.flatten().tolist()) for row in index)
    counts = np.array(list(seen.values()))
    assert Counter(key[0] for key in seen) == {"omniglot": 20, "mini_quickdraw": 10}
    assert counts.sum() == 2000 and abs(counts / 2000 - 1 / 30).max() < 0.025


def test_buffer_keeps_its_tasks():
    """Follow-The-Meta-Leader's tasks of a dataset are the same ones in its own stage and in later stages."""
    arrived, cfg, seen = [toy_data(0, iterations=2), toy_data(1, name="mini_quickdraw")], toy_config(meta_batch=3), []
    for stage in (arrived[:1], arrived):
        batches = [boml.from_buffer(stage, i, cfg, 0) for i in range(60)]
        seen.append({tuple(index.flatten().tolist()) for batch in batches for d, index in batch if d is arrived[0]})
    assert seen[0] == seen[1] and len(seen[0]) == 6


def pack(folder, name, sizes, shape=(28, 28), kind="real", each=3):
    """data/<name>.npz with noise for images and classes in alphabets of six, `sizes` of them in each split."""
    folder.mkdir(exist_ok=True)
    classes = [f"alphabet {i // 6:02d}/{i % 6}" for i in range(sum(sizes))]
    labels = np.repeat(np.arange(len(classes)), each)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    np.savez(folder / f"{name}.npz", images=images, labels=labels, classes=classes,
             split=np.repeat(boml.SPLITS, sizes), origin=[kind, "made up"])


@pytest.fixture(scope="module")
def fake_data(tmp_path_factory):
    """Files in the shape of four real datasets, with three images of each class."""
    folder = tmp_path_factory.mktemp("data")
    pack(folder, "omniglot", (10, 10, 10))
    pack(folder, "mini_quickdraw", (25, 25, 25))
    pack(folder, "cifar_fs", (25, 20, 20), (28, 28, 3))
    pack(folder, "omniglot_alphabets", (36, 12, 12))
    return folder


SMALL = ("--filters 4 --iterations 4 --meta-batch 2 --query 2 --eval-tasks 3 --eval-every 2 --hessian-tasks 3 "
         "--mc-samples 2 --device cpu").split()


def runs_of(*argv):
    """The runs that run.sh starts for a command line, as their own command lines, parsed."""
    own, rest = data_prep.launch_options().parse_known_args([str(a) for a in argv])
    return [boml.parse(line) for line in data_prep.command_lines(own, rest)]


def work_here(*argv, progress=lambda share: False):
    """The same, run in this process, which spares their start; folders are packed as run.sh does."""
    own, rest = data_prep.launch_options().parse_known_args([str(a) for a in argv])
    with tempfile.TemporaryDirectory() as folder:
        for args, _ in data_prep.prepare_runs(list(data_prep.command_lines(own, rest)), Path(folder)):
            shares = []
            assert boml.work(args, lambda share: shares.append(share) or progress(share))
            assert shares == sorted(shares) and shares[-1:] in ([], [1.0])


class Copied:
    """A process as subprocess.Popen starts it, but as a copy of this one, which spares the import of torch."""

    def __init__(self, line, stdout, env):
        self.returncode, self.pid = None, os.fork()
        if not self.pid:
            code = 1
            try:
                sys.stdout = open(os.devnull, "w")
                boml.one_sentence(boml.main, line[2:])
                code = 0
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)

    def poll(self, how=os.WNOHANG):
        pid, status = os.waitpid(self.pid, how) if self.returncode is None else (0, 0)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else self.returncode
        return self.returncode

    def wait(self):
        return self.poll(0)

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)


@pytest.fixture
def forks(monkeypatch):
    """Runs side by side start as copies of this process."""
    monkeypatch.setattr(data_prep, "subprocess", SimpleNamespace(Popen=Copied, DEVNULL=None))


def launch(*argv):
    """What run.sh does with the command line of an experiment."""
    data_prep.main(["launch", *map(str, argv)])


def rows_of(path):
    """The record without its times."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


def test_every_method_end_to_end(fake_data, tmp_path, forks, capsys):
    """A command line takes every method through the triathlon, records it as planned and reports it."""
    launch("triathlon", "--data", fake_data, *SMALL, "--jobs", 2, "--out", tmp_path)
    text = capsys.readouterr().out
    assert "triathlon, real data, cpu schedule" in text and all(m.label in text for m in boml.METHODS.values())
    folder = tmp_path / "triathlon"
    for method in boml.METHODS:
        rows = rows_of(folder / f"{method}-0" / "record.jsonl")
        evaluations = 2 + 4 + 6 if method == "toe" else 2 + 2 + 2  # of the stages; Train-On-Everything's grow longer
        assert len(rows) == evaluations * 3
        scores = {p + s for p in ("", "sampled_")[: 1 + (method == "bomvi")] for s in ("accuracy", "ci95", "nll")}
        assert all(set(r) == scores | {
            "experiment", "schedule", "data", "way", "split", "settings", "revision", "method", "variant", "seed",
            "datasets", "stages", "stage", "iteration", "iterations", "newest", "evaluated", "start_from"} for r in rows)
    data_prep.main(["report", "--out", str(tmp_path)])
    assert all(m.label in (folder / "report.md").read_text() for m in boml.METHODS.values())
    ElementTree.parse(folder / "accuracy.svg")


def test_run_repeats_itself(fake_data, tmp_path):
    """Two runs of the same command line leave the same record."""
    for out in "ab":
        work_here("run", "--sequence", "mini_quickdraw,omniglot", "--data", fake_data, *SMALL, "--methods", "bomvi",
                  "--out", tmp_path / out)  # BomVI draws the most
    assert_same_run(tmp_path / "a/run/bomvi-0", tmp_path / "b/run/bomvi-0")


@pytest.mark.parametrize("jobs", [1, 2])
def test_run_that_fails_is_named(jobs, fake_data, tmp_path, forks, capfd):
    """A run that cannot write is named with its sentence and status; those beside it come to their end, and no other
    starts."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "maml-0").write_text("a file where a folder should be")
    failed = "maml-0, ftml-0" if jobs == 1 else "maml-0"
    with pytest.raises(boml.Problem, match=rf"^{failed} did not finish, for the reason above\.$"):
        launch("run", "--sequence", "omniglot", "--data", fake_data, *SMALL, "--jobs", jobs, "--methods", "maml,ftml",
               "--out", tmp_path)
    said = capfd.readouterr().err
    assert "boml: [Errno 17] File exists" in said and "maml-0 has failed" in said and "Traceback" not in said
    assert (tmp_path / "run/ftml-0").exists() == (jobs == 2)
    assert jobs == 1 or [r["iteration"] for r in rows_of(tmp_path / "run/ftml-0/record.jsonl")] == [2, 4]


def test_refused_run_is_named_at_once(fake_data, tmp_path, forks, capfd, monkeypatch):
    """A run that is refused is named before the next one starts; that one is run and reported without it."""
    (tmp_path / "run" / "maml-0").mkdir(parents=True)
    (tmp_path / "run" / "maml-0" / "record.jsonl").write_text("5\n")
    real_reader, seen = data_prep.read_records, []
    monkeypatch.setattr(data_prep, "read_records", lambda *a: seen.append(
        (capfd.readouterr().err, (tmp_path / "run/ftml-0").exists())) or real_reader(*a))
    with pytest.raises(boml.Problem, match=r"^maml-0 did not finish"):
        launch("run", "--sequence", "omniglot", "--data", fake_data, *SMALL, "--jobs", 1, "--methods", "maml,ftml",
               "--out", tmp_path)
    (said, started), _ = seen
    assert "--fresh with --methods maml" in said and "boml: maml-0 has failed (2)." in said and not started
    assert "| Follow-The-Meta-Leader | 1 |" in capfd.readouterr().out
    assert (tmp_path / "run/maml-0/record.jsonl").read_text() == "5\n"


def test_end_is_estimated_from_this_session(monkeypatch, capsys):
    """A resumed run says when it will end by its pace since it was resumed."""
    now = [0.0]
    monkeypatch.setattr(boml.time, "time", lambda: now[0])
    monkeypatch.setattr(boml.time, "localtime", time.gmtime)
    monkeypatch.setattr(boml.signal, "signal", lambda *_: None)
    progress = boml.reporter("maml-0")
    for seconds, done in ((0, 0.9), (610, 0.91), (1220, 0.92)):
        now[0] = seconds
        assert not progress(done)
    # 1 % in 610 seconds, so 10 % in 6100
    assert capsys.readouterr().err == "maml-0: 91%, ends Thu 01:41\nmaml-0: 92%, ends Thu 01:41\n"


def test_generated_data_is_labelled(tmp_path, forks, capsys, monkeypatch):
    """Where a dataset cannot be had, a generated one runs under its own name, labelled in table, record and report."""
    cut_off(monkeypatch)
    pack(tmp_path / "data", "generated_aeroplanes", (6, 6, 6), (28, 28, 3), kind="generated")
    launch("run", "--sequence", "aircraft", "--data", tmp_path / "data", "--out", tmp_path, "--methods", "maml", *SMALL,
           "--iterations", 1)
    text, report = capsys.readouterr().out, data_prep.report(tmp_path / "run")
    assert "run, generated data" in text and "run, generated data" in report
    assert "generated_aeroplanes (generated)" in text and "aircraft" not in report
    rows = rows_of(tmp_path / "run" / "maml-0" / "record.jsonl")
    assert {r["data"] for r in rows} == {"generated"}
    assert {r["evaluated"] for r in rows} == {"generated_aeroplanes"}


def test_missing_data_is_named(tmp_path):
    """A dataset that is not there is named, with the ways to get one."""
    with pytest.raises(boml.Problem, match="aircraft.npz is not there; .*run.sh data aircraft"):
        boml.main(["run", "--sequence", "aircraft", "--data", str(tmp_path)])


FACTS = dict(experiment="triathlon", schedule="cpu", data="real", way=5, settings="12345678", revision="none",
             start_from="")
TINY = dict(filters=1, way=2, query=1, channels=1, meta_batch=1, eval_tasks=1, hessian_tasks=1, mc_samples=1)


def new_run(out, method, cfg, sequence, progress=lambda share: False, device="cpu"):
    return boml.Run(boml.Job(method, method, 0, cfg), sequence, sequence, FACTS, out, progress, device)


def toy_run(out, method, cfg=None, progress=lambda share: False, fresh=False, sequence=None, device="cpu"):
    """A run of two datasets, in its folder alone; False if it was stopped."""
    sequence = sequence or [toy_data(0, iterations=6), toy_data(1, name="mini_quickdraw", iterations=8)]
    run = new_run(out, method, cfg or toy_config(eval_every=4), sequence, progress, device)
    with boml.lock(out):
        run.resume(fresh)
        return run.go()


def state_of(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


def flat(x):
    """The values in dictionaries, lists and tuples within each other, and their keys."""
    if isinstance(x, dict):
        return [y for k, v in x.items() for y in (k, *flat(v))]
    return [y for v in x for y in flat(v)] if isinstance(x, (list, tuple)) else [x]


def assert_same_run(a, b):
    """The same record but for its times, and the same final state, bit by bit."""
    assert rows_of(a / "record.jsonl") == rows_of(b / "record.jsonl")
    assert_same_state(a, b, "stage", "iteration", "theta", "posterior", "optimiser", "settings")


def assert_same_state(a, b, *keys):
    one, two = state_of(a), state_of(b)
    for key in keys:
        x, y = flat([one[key]]), flat([two[key]])
        assert len(x) == len(y), key
        assert all(torch.equal(v, w) if isinstance(v, torch.Tensor) else v == w for v, w in zip(x, y)), key


@pytest.mark.parametrize("method", boml.METHODS)
def test_resumed_run_equals_unbroken(method, tmp_path):
    """A run broken off after a checkpoint and resumed leaves the same record and state as one that was not."""
    sequence = [toy_data(0, iterations=2), toy_data(1, name="mini_quickdraw", iterations=4),
                toy_data(2, channels=3, name="cifar_fs")]
    go = lambda out, progress: toy_run(tmp_path / out, method, toy_config(eval_every=2), progress, sequence=sequence)
    shares = []
    assert go("whole", shares.append)

    def stop(share):
        if share == shares[len(shares) // 2]:  # in the middle, one iteration after an evaluation
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go("broken", stop)
    with open(tmp_path / "broken" / "record.jsonl", "a") as record:
        record.write("a row that came after the checkpoint\n")
    assert go("broken", lambda share: False)
    assert_same_run(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.parametrize("method", boml.METHODS)
def test_run_killed_again_and_again_equals_unbroken(method, tmp_path, monkeypatch):
    """A run killed without warning at twenty random moments, and resumed each time, ends as one that was not."""
    monkeypatch.setattr(boml, "CHECKPOINT_EVERY", 1)
    cfg, start = toy_config(eval_every=4, **TINY), time.time()
    toy_run(tmp_path / "whole", method, cfg)
    wait, rng, kills, ended = (time.time() - start) / 3, np.random.default_rng(0), 0, False
    while kills < 20 or not ended:
        if ended:  # before the twentieth kill: once more from the start
            assert_same_run(tmp_path / "killed", tmp_path / "whole")
            shutil.rmtree(tmp_path / "killed")
        pid = os.fork()
        if not pid:
            try:
                toy_run(tmp_path / "killed", method, cfg)
            except BaseException:
                os._exit(1)
            os._exit(0)
        if kills < 20:
            time.sleep(rng.uniform(0, wait))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        ended = not os.WIFSIGNALED(status)
        assert not ended or status == 0
        kills += not ended  # only those that hit it running
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_run_killed_at_any_write_equals_unbroken(tmp_path, monkeypatch):
    """A run that dies just before any one of its files takes its place, and is resumed, ends as one that did not."""
    monkeypatch.setattr(boml, "CHECKPOINT_EVERY", 1)
    sequence = [toy_data(0, iterations=2), toy_data(1, name="mini_quickdraw", iterations=2)]
    go = lambda out: toy_run(tmp_path / out, "bomla", toy_config(eval_every=2, **TINY), sequence=sequence)
    real_replace, replaced, differ = os.replace, [], []

    def replace(old, new, dies_at=None):
        if dies_at is not None and len(replaced) == dies_at:
            raise KeyboardInterrupt
        replaced.append(new.name)
        real_replace(old, new)

    monkeypatch.setattr(os, "replace", replace)
    go("whole")
    writes = list(replaced)
    assert writes[-3:] == ["checkpoint.before.pt", "checkpoint.pt", "record.jsonl"] and len(writes) == 4 * 3 - 1
    for n, name in enumerate(writes):
        replaced.clear()
        monkeypatch.setattr(os, "replace", lambda old, new: replace(old, new, n))
        with pytest.raises(KeyboardInterrupt):
            go(f"{n}")
        monkeypatch.setattr(os, "replace", real_replace)
        go(f"{n}")
        try:
            assert_same_run(tmp_path / f"{n}", tmp_path / "whole")
        except AssertionError:
            differ.append(f"write {n + 1} of {len(writes)}, of {name}")
    assert not differ


@pytest.mark.parametrize("method", boml.METHODS)
def test_stopped_run_equals_unbroken(method, tmp_path):
    """A run asked to stop finishes its iteration and writes a checkpoint; resumed again and again, it ends the same."""
    cfg = toy_config(eval_every=4, **TINY)
    assert toy_run(tmp_path / "whole", method, cfg)
    asked, stops = np.random.default_rng(1), 0
    while not toy_run(tmp_path / "stopped", method, cfg, lambda share: asked.random() < 0.4):
        stops += 1
        assert stops < 60
    assert stops > 3
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_everything_is_evaluated_when_maml_would_end(tmp_path):
    """Train-On-Everything is also evaluated after as many iterations as sequential MAML has on the newest dataset."""
    toy_run(tmp_path, "toe", toy_config(**TINY))
    rows = rows_of(tmp_path / "record.jsonl")
    assert {(r["stage"], r["iteration"], r["iterations"], r["newest"]) for r in rows} == {
        (1, 6, 6, 6), (2, 8, 14, 8), (2, 14, 14, 8)}
    assert len(rows) == 3 * 2  # on every dataset


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A folder with a run, and the same one stopped in the middle."""
    out = tmp_path_factory.mktemp("run")
    assert toy_run(out / "whole", "maml", toy_config(eval_every=4, **TINY))
    assert not toy_run(out / "stopped", "maml", toy_config(eval_every=4, **TINY), lambda share: share > 0.7)
    state = state_of(out / "stopped")
    assert state["stage"] == 1 and 0 < state["iteration"] < 8
    return out


def copy_of(folder):
    """Of the results, in a new folder beside it."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / "copy"
    shutil.copytree(folder, copy)
    return copy


def contents(folder):
    """The results in a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@settings(max_examples=10)
@given(part=st.floats(0, 0.999), flip=st.booleans())
def test_damaged_checkpoint_falls_back(part, flip, halfway):
    """A checkpoint cut off anywhere, or with a byte changed, is left for the one before it: the run ends the same."""
    broken = copy_of(halfway / "stopped")
    path = broken / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    at = int(part * len(content))
    if flip:
        content[at] ^= 255
    path.write_bytes(content if flip else content[:at])
    toy_run(broken, "maml", toy_config(eval_every=4, **TINY))
    assert_same_run(broken, halfway / "whole")


@pytest.mark.parametrize("key", ["settings", "learned", "stage", "iteration", "rows", "seconds", "theta", "posterior",
                                 "optimiser"])
def test_foreign_checkpoint_falls_back(key, halfway):
    """A checkpoint without a key or with something else in its place is left for the one before it: the run ends the
    same."""
    state = state_of(halfway / "stopped")
    for change in ({}, {key: "text"}):
        broken = copy_of(halfway / "stopped")
        torch.save({k: v for k, v in state.items() if k != key} | change, broken / "checkpoint.pt")
        toy_run(broken, "maml", toy_config(eval_every=4, **TINY))
        assert_same_run(broken, halfway / "whole")
        assert (broken / "checkpoint.damaged").exists()


def test_checkpoint_that_is_no_file(halfway):
    """A FIFO in the place of the newest checkpoint is not waited for."""
    broken = copy_of(halfway / "stopped")
    (broken / "checkpoint.pt").unlink()
    os.mkfifo(broken / "checkpoint.pt")
    toy_run(broken, "maml", toy_config(eval_every=4, **TINY))
    assert_same_run(broken, halfway / "whole")


def test_changed_program_is_said(halfway, capsys, monkeypatch):
    """A run continued by a changed program says so, and each row keeps the revision that computed it."""
    for which, newer in (("stopped", True), ("whole", False)):
        copy = copy_of(halfway / which)
        with monkeypatch.context() as patch:
            patch.setitem(FACTS, "revision", "newer")
            toy_run(copy, "maml", toy_config(eval_every=4, **TINY))
        assert "maml-0: the program has changed since none; going on." in capsys.readouterr().err
        revisions = [row["revision"] for row in rows_of(copy / "record.jsonl")]
        assert revisions[0] == "none" and revisions[-1] == ("newer" if newer else "none")


def test_revision_says_what_is_not_committed(tmp_path, monkeypatch):
    """The revision of a record tells a changed program from the committed one."""
    monkeypatch.setattr(boml, "HERE", tmp_path)
    (tmp_path / "boml.py").write_text("one")
    for line in ("init -q", "add .", "-c user.name=a -c user.email=b commit -q -m one"):
        subprocess.run(["git", "-C", tmp_path, *line.split()], check=True)
    clean = boml.revision()
    (tmp_path / "boml.py").write_text("two")
    assert re.fullmatch("[0-9a-f]{7,}", clean) and boml.revision() == f"{clean}-dirty"


def test_damaged_checkpoint_is_named(halfway, capsys):
    """A damaged checkpoint is named before the run goes on from the one before it."""
    broken = copy_of(halfway / "stopped")
    (broken / "checkpoint.pt").write_bytes(b"damage")
    toy_run(broken, "maml", toy_config(eval_every=4, **TINY))
    assert re.search(r"^boml: \S+/checkpoint\.pt is damaged \(.*\)\.$", capsys.readouterr().err)


def test_checkpoint_that_may_not_be_read(halfway, monkeypatch):
    """A newest checkpoint without read permission stops the run, which does not fall back and renames nothing."""
    copy, read = copy_of(halfway / "stopped"), Path.read_bytes
    before = contents(copy)

    def refuse(path):
        if path.name == "checkpoint.pt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(PermissionError):
            toy_run(copy, "maml", toy_config(eval_every=4, **TINY))
    assert contents(copy) == before


@pytest.mark.parametrize("which", ["stopped", "whole"])
@pytest.mark.parametrize("how", ["missing", "short", "foreign"])
def test_record_is_made_from_the_checkpoint(which, how, halfway):
    """A record that is missing, cut off or overwritten is no damage: resuming the run makes it again."""
    copy = copy_of(halfway / which)
    path = copy / "record.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if how == "short" else b"\xff5\n")
    if how == "missing":
        path.unlink()
    toy_run(copy, "maml", toy_config(eval_every=4, **TINY))
    assert_same_run(copy, halfway / "whole")


@pytest.mark.parametrize("left", [["record.jsonl"], ["checkpoint.pt"], ["checkpoint.before.pt"],
                                  ["checkpoint.pt", "checkpoint.before.pt", "record.jsonl"]], ids=len)
def test_results_without_a_checkpoint_are_kept(left, halfway):
    """Results without a checkpoint that can be read are refused with the ways out, and stay as they are."""
    copy = copy_of(halfway / "whole")
    for path in copy.iterdir():
        if path.name not in left:
            path.unlink()
        elif path.suffix == ".pt":
            path.write_bytes(path.read_bytes()[:-100])
    before = contents(copy)
    assert sorted(before) == sorted(left)
    with pytest.raises(boml.Problem, match="no readable checkpoint; use another --out, or --fresh"):
        toy_run(copy, "maml", toy_config(eval_every=4, **TINY))
    assert contents(copy) == before


def test_record_alone_survives_a_command(fake_data, tmp_path):
    """A command that would run in the folder of a record without a checkpoint leaves it byte for byte."""
    folder = tmp_path / "run" / "maml-0"
    folder.mkdir(parents=True)
    (folder / "record.jsonl").write_bytes(b"what somebody\xff computed last year\n")
    with pytest.raises(boml.Problem, match="--out.*--fresh"):
        work_here("run", "--sequence", "omniglot", "--methods", "maml", "--data", fake_data, "--out", tmp_path, *SMALL)
    assert contents(folder) == {"record.jsonl": b"what somebody\xff computed last year\n"}


@pytest.mark.parametrize("changes, named", [
    (dict(cfg=toy_config(eval_every=4, **TINY | dict(query=2))), "query was 1, is 2\\); go back to them, or use another"),
    (dict(sequence=[toy_data(0, iterations=6), toy_data(1, name="mini_quickdraw", iterations=9)]),
     "mini_quickdraw's iterations was 8, is 9\\); go back to them, or use another --out"),
    (dict(sequence=[toy_data(0, iterations=6), toy_data(1, name="cifar_fs", iterations=8)]),
     "a run of omniglot,mini_quickdraw, which omniglot,cifar_fs does not continue.*--out"),
    (dict(sequence=[toy_data(0, iterations=6)]), "omniglot,mini_quickdraw, which omniglot does not continue.*--out")])
def test_run_of_other_settings_is_refused(changes, named, halfway):
    """A run is not continued with other settings: the sentence names what differs, with no advice to delete, and the
    results stay as they are."""
    copy = copy_of(halfway / "stopped")
    before = contents(copy)
    with pytest.raises(boml.Problem, match=named) as refused:
        toy_run(copy, "maml", **dict(cfg=toy_config(eval_every=4, **TINY)) | changes)
    assert contents(copy) == before and "--fresh" not in str(refused.value)  # which deletes a posterior


def test_option_newer_than_a_run_has_its_default(halfway):
    """A checkpoint that lacks an option goes on where the option has its default, and nowhere else."""
    copy = copy_of(halfway / "stopped")
    state = state_of(copy)
    del state["settings"]["keep_labels"]
    torch.save(state, copy / "checkpoint.pt")
    with pytest.raises(boml.Problem, match="keep_labels was False, is True"):
        toy_run(copy, "maml", toy_config(eval_every=4, keep_labels=True, **TINY))
    assert toy_run(copy, "maml", toy_config(eval_every=4, **TINY))


def test_sequence_goes_on_without_the_old_images(fake_data, tmp_path):
    """A run continued with the next dataset, the learned one gone and its newest checkpoint damaged, ends with the
    parameters and posterior of the unbroken run."""
    shutil.copytree(fake_data, tmp_path / "data")
    line = ["--data", tmp_path / "data", *SMALL, "--methods", "maml,bomla,bomvi", "--out"]
    work_here("run", "--sequence", "omniglot,mini_quickdraw", *line, tmp_path / "whole")
    work_here("run", "--sequence", "omniglot", *line, tmp_path / "parts")
    (tmp_path / "data/omniglot.npz").unlink()
    for path in tmp_path.glob("parts/run/*/checkpoint.pt"):
        shutil.copy(path, path.with_name("checkpoint.before.pt"))
        path.write_bytes(b"damaged")
    work_here("run", "--sequence", "omniglot,mini_quickdraw", *line, tmp_path / "parts")
    for method in ("maml", "bomla", "bomvi"):
        whole, parts = (tmp_path / f"{out}/run/{method}-0" for out in ("whole", "parts"))
        assert_same_state(whole, parts, "stage", "theta", "posterior", "learned")


@pytest.mark.parametrize("method", ["maml", "bomla", "bomvi"])
def test_continued_run_killed_equals_unbroken(method, fake_data, tmp_path, monkeypatch):
    """A run continued without the learned images and killed during the next dataset, and resumed, ends with
    the parameters, posterior and optimiser of the unbroken run."""
    monkeypatch.setattr(boml, "CHECKPOINT_EVERY", 1)
    shutil.copytree(fake_data, tmp_path / "data")
    line = ["--data", tmp_path / "data", *SMALL, "--methods", method, "--out"]
    both = ["run", "--sequence", "omniglot,mini_quickdraw", *line]
    work_here(*both, tmp_path / "whole")
    work_here("run", "--sequence", "omniglot", *line, tmp_path / "killed")
    (tmp_path / "data/omniglot.npz").unlink()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            work_here(*both, tmp_path / "killed", progress=lambda share: share > 0.8 and os.kill(os.getpid(), 9))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    state = state_of(tmp_path / f"killed/run/{method}-0")
    assert (state["stage"], state["iteration"]) == (1, 2)
    work_here(*both, tmp_path / "killed")
    whole, killed = (tmp_path / f"{out}/run/{method}-0" for out in ("whole", "killed"))
    assert_same_state(whole, killed, "stage", "iteration", "theta", "posterior", "optimiser", "learned", "settings")


def test_folder_with_a_dot_may_be_gone(fake_data, tmp_path):
    """A learned folder may be gone whatever its name, also one with a dot, or written with a slash."""
    own = own_folder(tmp_path / "2026.01", 12)
    line = ["--data", fake_data, *SMALL, "--methods", "maml", "--out", tmp_path]
    work_here("run", "--sequence", own, *line)
    shutil.rmtree(own)
    work_here("run", "--sequence", f"{own}/,omniglot", *line)
    assert state_of(tmp_path / "run/maml-0")["stage"] == 2


def test_old_data_that_is_needed_is_named(fake_data, tmp_path):
    """Methods that train on all datasets say that a learned one is gone."""
    shutil.copytree(fake_data, tmp_path / "data")
    line = ["--data", tmp_path / "data", *SMALL, "--methods", "toe", "--out", tmp_path]
    work_here("run", "--sequence", "omniglot", *line)
    (tmp_path / "data/omniglot.npz").unlink()
    with pytest.raises(boml.Problem, match="toe trains on all datasets, and omniglot is gone"):
        work_here("run", "--sequence", "omniglot,mini_quickdraw", *line)


def test_start_from_keeps_its_source(fake_data, tmp_path):
    """A run cannot start from its own folder, not even afresh, and the posterior there stays."""
    line = ["run", "--sequence", "omniglot", "--data", fake_data, *SMALL, "--methods", "bomla", "--out", tmp_path]
    work_here(*line)
    before = contents(tmp_path / "run/bomla-0")
    with pytest.raises(boml.Problem, match="--start-from .* is not the folder of another run of bomla"):
        work_here(*line, "--fresh", "--start-from", tmp_path / "run/bomla-0")
    assert contents(tmp_path / "run/bomla-0") == before


def test_start_from_is_not_for_those_who_start_anew(fake_data, tmp_path):
    """Train-On-Everything, which would forget the start at its second stage, is refused one."""
    line = ["run", "--data", fake_data, *SMALL, "--methods", "toe"]
    work_here(*line, "--sequence", "omniglot", "--out", tmp_path / "one")
    with pytest.raises(boml.Problem, match="--start-from is not for toe, whose stages start from scratch"):
        work_here(*line, "--sequence", "mini_quickdraw", "--out", tmp_path / "two", "--start-from",
                  tmp_path / "one/run/toe-0")


def test_runs_that_start_elsewhere_are_apart():
    """A run that starts from another is not in one table with those that start afresh."""
    facts = [boml.shared_facts(boml.parse(["triathlon", *more]), [])["settings"]
             for more in ((), ("--start-from", "a"), ("--start-from", "b"))]
    assert len(set(facts)) == 3


def test_start_from_an_unfinished_stage_is_refused(fake_data, tmp_path):
    """No run starts from one that was stopped within a stage, whose posterior lags behind its parameters."""
    line = ["run", "--data", fake_data, *SMALL, "--methods", "bomla"]
    stopped, = runs_of(*line, "--sequence", "omniglot", "--out", tmp_path / "one")
    assert not boml.work(stopped, lambda share: True)
    with pytest.raises(boml.Problem, match="another run of bomla .* that has come to the end of a dataset"):
        work_here(*line, "--sequence", "mini_quickdraw", "--out", tmp_path / "two", "--start-from",
                  tmp_path / "one/run/bomla-0")
    assert not list(tmp_path.glob("two/run/bomla-0/checkpoint*"))


def test_started_run_goes_on_without_its_source(fake_data, tmp_path):
    """A run begun at another's posterior goes on when that is gone, and is refused another beginning, unharmed."""
    line = ["--data", fake_data, *SMALL, "--methods", "bomla", "--out"]
    for out in "ab":
        work_here("run", "--sequence", "omniglot", *line, tmp_path / out)
    line += [tmp_path / "c"]
    start = ["--start-from", tmp_path / "a/run/bomla-0"]
    work_here("run", "--sequence", "mini_quickdraw", *line, *start)
    shutil.rmtree(tmp_path / "a")
    work_here("run", "--sequence", "mini_quickdraw,cifar_fs", *line, *start)
    before = contents(tmp_path / "c/run/bomla-0")
    assert state_of(tmp_path / "c/run/bomla-0")["settings"]["start_from"] == str(tmp_path / "a/run/bomla-0")
    with pytest.raises(boml.Problem, match=r"start_from was '\S+/a/run/bomla-0', is '\S+/b/run/bomla-0'"):
        work_here("run", "--sequence", "mini_quickdraw,cifar_fs", *line, "--start-from", tmp_path / "b/run/bomla-0")
    assert contents(tmp_path / "c/run/bomla-0") == before


@pytest.mark.parametrize("method", ["maml", "bomla", "bomvi"])
def test_start_from_begins_where_the_other_ended(method, fake_data, tmp_path):
    """A run that starts from another has that one's parameters at first, and goes on from its posterior."""
    line = ["run", "--data", fake_data, *SMALL, "--iterations", "1", "--methods", method]
    work_here(*line, "--sequence", "omniglot", "--out", tmp_path / "one")
    work_here(*line, "--sequence", "mini_quickdraw", "--out", tmp_path / "two", "--start-from",
              tmp_path / f"one/run/{method}-0", "--outer-rate", 0, "--logvar-rate", 0)
    one, two = (state_of(tmp_path / f"{out}/run/{method}-0") for out in ("one", "two"))
    assert all(torch.equal(v, two["theta"][name]) for name, v in one["theta"].items())
    if method == "bomla":
        (old,), (new,) = (state["posterior"]["blocks"]["norm1"] for state in (one, two))
        assert torch.linalg.eigvalsh(new - old).min() > -1e-6 * old.max() and not torch.equal(new, old)
    if method == "bomvi":
        assert all(torch.equal(v, two["posterior"]["logvar"][name]) for name, v in one["posterior"]["logvar"].items())


@pytest.mark.parametrize("method, classes", [("maml", 2), ("bomla", 3), ("bomvi", 5)])
def test_classes_are_told_as_in_an_evaluation(method, classes, fake_data, tmp_path, monkeypatch):
    """classify writes the probabilities that adapting and predicting, at BomVI's mean, give on the same task, and leaves
    out what is no image."""
    work_here("run", "--sequence", "omniglot", "--data", fake_data, *SMALL, "--initial-logvar", -3, "--methods", method,
              "--out", tmp_path)
    own_folder(tmp_path / "labelled", classes, 1), own_folder(tmp_path / "images", classes, 3)
    shutil.copytree(tmp_path / "images", tmp_path / "good")
    (tmp_path / "images/class 0/broken.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    line = ["classify", "--from", tmp_path / f"run/{method}-0", "--labelled", "labelled", "--images", "images",
            "--eval-steps", 3]
    data_prep.main([str(a) for a in line])
    rows = [row.split(",") for row in (tmp_path / "predictions.csv").read_text().splitlines()]
    assert rows[0] == ["file", "class", *(f"class {c}" for c in range(classes))] and len(rows) == 1 + 3 * classes
    with pytest.raises(boml.Problem, match="predictions.csv is here already; move it away"):
        data_prep.main([str(a) for a in line])
    state = state_of(tmp_path / f"run/{method}-0")
    first = lambda p: {n: v[:classes] if n.startswith("linear") else v for n, v in p.items()}
    theta, (x_s, y_s, _), (x_q, _, _) = first(state["theta"]), *(
        data_prep.read_classes(tmp_path / f, 3) for f in ("labelled", "good"))
    posterior = boml.METHODS[method].posterior(toy_config(channels=3), theta)
    posterior.load({n: first(v) if n == "logvar" else v for n, v in state["posterior"].items()})
    images = [boml.to_floats(torch.tensor(x).permute(0, 3, 1, 2)[None], 3) for x in (x_s, x_q)]
    adapted = plain_adapt(theta, images[0][0], torch.tensor(y_s), 0.4, 3)
    found = posterior.predict(boml.spread(adapted, 1), images[1], [boml.stream("cpu", "classify")])
    expected = found[""][0].exp()
    assert_close(np.array([[float(v) for v in row[2:]] for row in rows[1:]]), expected.detach(), rtol=0, atol=2e-4)


def test_predictions_on_a_full_disk(tmp_path, monkeypatch, capsys):
    """Predictions that cannot be written leave no file in the way of the next attempt."""
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="predictions.csv cannot be written .*No space left on device"):
        data_prep.write_predictions(tmp_path / "predictions.csv", ["a"], [Path("x.png")], np.ones((1, 1)))
    assert not list(tmp_path.iterdir())


def test_classify_takes_the_dataset_it_was_trained_on(fake_data, tmp_path, monkeypatch, capsys):
    """The network of a run that was stopped adapts as its newest dataset does, not as one that is still to come."""
    line = ["run", "--sequence", "omniglot,cifar_fs", "--data", fake_data, *SMALL, "--methods", "maml", "--out", tmp_path]
    own_folder(tmp_path / "labelled", 2, 1)
    monkeypatch.chdir(tmp_path)
    for share, expected in ((0.1, "alpha 0.4"), (0.6, "alpha 0.1")):
        args, = runs_of(*line)
        assert not boml.work(args, lambda done: done > share)
        data_prep.main("classify --from run/maml-0 --labelled labelled --images labelled".split())
        assert expected in capsys.readouterr().out
        (tmp_path / "predictions.csv").unlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError(
    "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")], ids=["of Python", "of torch"])
def test_write_that_fails_leaves_the_last_checkpoint(error, tmp_path, monkeypatch):
    """A full disk in the middle of a checkpoint loses nothing: the run resumes at the one before and ends the same."""
    cfg = toy_config(eval_every=4, **TINY)
    toy_run(tmp_path / "whole", "ftml", cfg)
    real_save, calls = torch.save, []

    def save(state, file):
        calls.append(1)
        if len(calls) == 3:
            file.write(b"half a checkpoint")
            raise error
        real_save(state, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"checkpoint\.pt cannot be written \(.*(No space|pos 64).*\); nothing was replaced\."):
        toy_run(tmp_path / "full", "ftml", cfg)
    assert not list(tmp_path.glob("full/*.tmp"))
    toy_run(tmp_path / "full", "ftml", cfg)
    assert_same_run(tmp_path / "full", tmp_path / "whole")


def test_interrupted_write_leaves_nothing(tmp_path):
    """Ctrl-C in the midst of a file leaves the old one and nothing else."""
    (tmp_path / "a.npz").write_text("old")
    with pytest.raises(KeyboardInterrupt), boml.replacing(tmp_path / "a.npz") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"] and (tmp_path / "a.npz").read_text() == "old"


def test_second_process_is_refused(fake_data, tmp_path):
    """While a run is at work in its folder, no other starts there; afterwards one does."""
    line = ["run", "--sequence", "omniglot", "--methods", "maml", "--data", fake_data, "--out", tmp_path, *SMALL]
    with boml.lock(tmp_path / "run" / "maml-0"):
        with pytest.raises(boml.Problem, match="another process is at work in .*maml-0; wait, or use another --out"):
            work_here(*line)
    work_here(*line)


def test_run_holds_its_lock(fake_data, tmp_path):
    """A run that is at work holds the lock of its folder at every iteration."""
    refused = []

    def progress(share):
        with pytest.raises(boml.Problem, match="another process"), boml.lock(tmp_path / "run" / "maml-0"):
            pass
        refused.append(share)

    work_here("run", "--sequence", "omniglot", "--methods", "maml", "--data", fake_data, "--out", tmp_path, *SMALL,
              progress=progress)
    assert len(refused) == 4


def test_fresh_start_spares_other_files(fake_data, tmp_path):
    """--fresh deletes a run's own files, not what else lies in its folder."""
    line = ["run", "--sequence", "omniglot", "--methods", "maml", "--data", fake_data, "--out", tmp_path, *SMALL]
    (tmp_path / "run/maml-0").mkdir(parents=True)
    (tmp_path / "run/maml-0/notes.txt").write_text("mine")
    work_here(*line)
    work_here(*line, "--fresh")
    assert (tmp_path / "run/maml-0/notes.txt").read_text() == "mine"


def test_fresh_start_waits_for_the_lock(fake_data, tmp_path):
    """--fresh takes nothing from a run that is at work, and starts a finished one over."""
    line = ["run", "--sequence", "omniglot", "--methods", "maml", "--data", fake_data, "--out", tmp_path, *SMALL]
    folder, steps = tmp_path / "run" / "maml-0", []
    work_here(*line)
    before = contents(folder)
    with boml.lock(folder), pytest.raises(boml.Problem, match="another process"):
        work_here(*line, "--fresh")
    assert contents(folder) == before and set(before) == {"checkpoint.pt", "checkpoint.before.pt", "record.jsonl"}
    work_here(*line, progress=steps.append)
    assert not steps  # it is finished
    work_here(*line, "--fresh", progress=steps.append)
    assert len(steps) == 4 and len(rows_of(folder / "record.jsonl")) == before["record.jsonl"].count(b"\n")


def test_processes_share_the_work(fake_data, tmp_path):
    """Two processes of torchrun come to the numbers of one, for every method, in float64."""
    program = tmp_path / "double.py"
    program.write_text(f"import sys, torch; sys.path.insert(0, {str(HERE)!r})\ntorch.set_num_threads(1)\n"
                       "torch.set_default_dtype(torch.double)\nimport boml\n*others, last = boml.METHODS\n"
                       "lines = {method: [*sys.argv[1:], '--method', method] for method in boml.METHODS}\n"
                       "boml.start_ranks(boml.parse(lines['bomla']))\nboml.start_ranks = lambda args: None\n"
                       "for method in others:\n    boml.work(boml.parse(lines[method]), lambda done: False)\n"
                       "boml.main(lines[last])\n")
    args = ["run", "--sequence", "omniglot,cifar_fs", "--data", fake_data, *SMALL, "--meta-batch", "3",
            "--iterations", "2", "--hessian-tasks", "20", "--out"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, *args,
            tmp_path / "2"]
    done = subprocess.run([str(x) for x in line], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    torch.set_default_dtype(torch.double)
    try:
        work_here(*args, tmp_path / "1")
    finally:
        torch.set_default_dtype(torch.float)
    for method in boml.METHODS:
        one, two = (tmp_path / str(n) / f"run/{method}-0" for n in (1, 2))
        a, b = (state_of(out)["theta"] for out in (one, two))
        for name, value in a.items():
            assert value.dtype == torch.double
            assert_close(b[name], value, rtol=1e-9, atol=1e-9)
        rows = [rows_of(out / "record.jsonl") for out in (one, two)]
        assert len(rows[0]) == len(rows[1]) > 0
        for a, b in zip(*rows):
            assert_close([b["nll"], b["accuracy"], b["ci95"]], [a["nll"], a["accuracy"], a["ci95"]])


def on_two_ranks(function, folder):
    """What function(rank) returns, or the text of its problem, in two processes that gloo joins."""
    def rank(n, answers):
        boml.RANK, boml.RANKS = n, 2
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=n, world_size=2)
        try:
            answers.put((n, function(n)))
        except boml.Problem as problem:
            answers.put((n, str(problem)))
        torch.distributed.barrier()

    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    processes = [fork.Process(target=rank, args=(n, answers), daemon=True) for n in range(2)]
    for process in processes:
        process.start()
    return [answer for _, answer in sorted(answers.get(timeout=60) for _ in processes)]


@pytest.mark.parametrize("content", [b"", b"a checkpoint"])
def test_first_rank_tells_the_others(content, tmp_path):
    """All ranks get the first one's bytes, whatever lies on their own disks."""
    told = on_two_ranks(lambda n: boml.from_first_rank(content if n == 0 else b"something else", "cpu"), tmp_path)
    assert told == [content, content]


@pytest.mark.parametrize("apart", [0.0, 1e-6])
def test_ranks_with_other_parameters_are_refused(apart, tmp_path):
    """Ranks whose parameters differ stop with a sentence; equal ones go on."""
    told = on_two_ranks(lambda n: boml.same_on_all_ranks({"w": torch.ones(3) + apart * n}), tmp_path)
    assert [bool(text and "different parameters" in text) for text in told] == 2 * [apart > 0]


def start_command(line, errors):
    """The launcher of run.sh with a command line as a program of its own."""
    return subprocess.Popen([sys.executable, HERE / "data_prep.py", "launch", *line], stdout=subprocess.DEVNULL,
                            stderr=errors, start_new_session=True).pid


def start_copy(line, errors):
    """The same in a copy of this process, and its runs in copies of that, which spares the import of torch."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)
        boml.heed(signal.default_int_handler)
        data_prep.subprocess = SimpleNamespace(Popen=Copied, DEVNULL=None)
        boml.one_sentence(launch, *line)
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)


@pytest.mark.parametrize("number, start, kill", [
    (signal.SIGTERM, start_command, os.kill), (signal.SIGINT, start_copy, os.killpg),
    (signal.SIGHUP, start_copy, os.killpg)], ids=["kill", "Ctrl-C", "closed terminal"])
def test_signal_ends_with_a_checkpoint(number, start, kill, fake_data, tmp_path):
    """SIGTERM to the launcher, Ctrl-C and a closed terminal, which reach its runs too, end it with status 130, a
    checkpoint of every run, and how to go on."""
    args = [*SMALL, "--iterations", "1000", "--eval-every", "1000", "--methods", "maml,bomla", "--jobs", "2"]
    with open(tmp_path / "errors", "wb") as errors:
        pid = start(["triathlon", "--data", fake_data, "--out", tmp_path, *args], errors)
    deadline = time.time() + 120
    while len(list(tmp_path.glob("triathlon/*/lock"))) < 2:
        assert time.time() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.1)
    time.sleep(0.5)
    kill(pid, number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    said = (tmp_path / "errors").read_text()
    assert "boml: stopped; the same command, without --fresh, goes on from the checkpoint." in said and "Traceback" not in said
    for method in ("maml", "bomla"):
        state = state_of(tmp_path / f"triathlon/{method}-0")
        assert state["stage"] == 0 and 0 < state["iteration"] < 1000


@pytest.mark.parametrize("program", [boml, data_prep], ids=["boml", "data_prep"])
def test_ignored_ctrl_c_stays_ignored(program, monkeypatch, capsys):
    """A run in the background, which the shell has ignore Ctrl-C, goes on ignoring it."""
    monkeypatch.setattr(sys, "argv", [program.__file__, "--help"])
    heard = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in heard]
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(SystemExit):
            runpy.run_path(program.__file__, run_name="__main__")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        for number, handler in zip(heard, before):
            signal.signal(number, handler)


@pytest.mark.parametrize("where", ["loss", "curvature"])
def test_values_that_are_not_finite_stop_the_run(where, tmp_path, monkeypatch):
    """A loss or a curvature that is not finite ends the run in a sentence with the dataset, and the last good state is
    kept."""
    real_step, real_curvature, calls = boml.meta_step, boml.adapted_curvature, Counter()

    def spoilt(*args):
        calls["step"] += 1
        return real_step(*args) * (math.nan if calls["step"] > 6 else 1)

    def bent(*args):
        calls["curvature"] += 1
        factor = math.nan if calls["curvature"] > 1 else 1
        return {n: tuple(f * factor for f in block) for n, block in real_curvature(*args).items()}

    monkeypatch.setattr(boml, *dict(loss=("meta_step", spoilt), curvature=("adapted_curvature", bent))[where])
    sentence = dict(loss="^the loss of bomla-0 became nan on mini_quickdraw by iteration 4; try a smaller --outer-rate",
                    curvature="^mini_quickdraw's curvature in conv1 is not finite; lower --outer-rate")
    with pytest.raises(boml.Problem, match=sentence[where]):
        toy_run(tmp_path, "bomla")
    state = state_of(tmp_path)
    assert (state["stage"], state["iteration"]) == (1, dict(loss=0, curvature=4)[where])
    assert all(v.isfinite().all() for v in flat(state["posterior"]) if isinstance(v, torch.Tensor))


# ----------------------------------------------------------------------------------------------------- Report


def made_up(variant, seed, accuracies, early=None, **more):
    """Rows of a run whose accuracy after stage t on dataset j is accuracies[t][j]; `early`: also that in the last stage
    after the newest dataset's J."""
    names, T = [f"d{j}" for j in range(len(accuracies[0]))], len(accuracies)
    facts = FACTS | dict(method=variant.split("@")[0], variant=variant, seed=seed, datasets=names, stages=T)
    row = facts | dict(newest=9, seconds=1.0, ci95=0.02, nll=1.0)
    end = lambda t: 9 * (t + 1) if facts["method"] == "toe" else 9
    rows = [row | dict(stage=t + 1, iteration=end(t), iterations=end(t), evaluated=name, accuracy=a)
            for t, values in enumerate(accuracies) for name, a in zip(names, values)]
    if early is not None:
        rows += [row | dict(stage=T, iteration=9, iterations=end(T - 1), evaluated=names[-1], accuracy=early)]
    return [r | more for r in rows]


def put(folder, *records):
    """The records as files, each in its folder."""
    for rows in records:
        path = folder / f"{rows[0]['variant']}-{rows[0]['seed']}" / "record.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TWO = [[0.8, 0.3], [0.6, 0.5]]  # the accuracies of a run on two datasets


@pytest.fixture
def known(monkeypatch):
    """Made-up datasets count as the paper's."""
    monkeypatch.setattr(boml, "DATASETS", dict.fromkeys(["d0", "d1", "d2"], boml.OWN))


def test_table_of_made_up_records(tmp_path):
    """The table has the means right after each dataset's own stage and after the last, with the interval over seeds."""
    values = [[[0.8, 0.3], [0.6, 0.5]], [[0.9, 0.3], [0.5, 0.7]], [[0.85, 0.3], [0.55, 0.6]]]
    put(tmp_path, *(made_up("maml", s, v) for s, v in enumerate(values)), made_up("bomla@1000", 0, TWO))
    text = data_prep.report(tmp_path)
    # Student's t with two degrees of freedom, 4.303, times standard errors of 5 and 10 points / sqrt(3)
    assert "\n| Sequential MAML | 3 | 85.0 -> 55.0 ± 12.4 | 60.0 ± 24.8 |\n" in text
    assert "\n| BomLA, lambda = 1000 | 1 | 80.0 -> 60.0 | 50.0 |\n" in text
    assert "\n| method | seeds | d0 | d1 |\n" in text and (tmp_path / "report.md").read_text().startswith(text)


def test_interval_is_students():
    """The interval over seeds is Student's, for more than ten seeds at most 15 % too wide, and infinite for fewer than
    three."""
    exact = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 29: 2.045}
    for freedom, t in exact.items():
        values = np.random.default_rng(freedom).normal(size=freedom + 1)
        found = data_prep.half_width(list(values)) / (values.std(ddof=1) / math.sqrt(len(values)))
        assert abs(found - t) < 0.006 if freedom < 10 else t < found < 1.15 * t  # two decimals
    assert all(math.isinf(data_prep.half_width(values)) for values in ([], [0.5], [0.5, 0.5]))


def test_unfinished_stage_does_not_count(tmp_path):
    """A seed in the middle of a stage enters no average until the stage is done."""
    unfinished = made_up("maml", 1, TWO)
    for row in unfinished[2:]:
        row.update(iteration=5, accuracy=0.0)
    put(tmp_path, made_up("maml", 0, TWO), unfinished)
    assert "80.0 -> 60.0 | 50.0 |" in data_prep.report(tmp_path)


def test_stage_to_come_is_left_open(tmp_path):
    """A report while runs are under way has the numbers that there are and dots for those to come."""
    put(tmp_path, made_up("maml", 0, TWO)[:2], made_up("bomla", 0, TWO))
    text = data_prep.report(tmp_path)
    assert "| Sequential MAML | 0 of 1 | 80.0 -> not evaluated | not evaluated |" in text and "| BomLA | 1 | 80.0 -> 60.0 | 50.0 |" in text


def test_run_without_evaluation_disturbs_no_other(tmp_path, capsys):
    """A run that has a checkpoint but no evaluation yet takes nothing from the report of the others."""
    put(tmp_path, made_up("bomla", 0, TWO), made_up("maml", 0, TWO))
    for name in ("bomvi-0", "a-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").touch()
    text = data_prep.report(tmp_path)
    assert all(f"| {label} | 1 | 80.0 -> 60.0 | 50.0 |" in text for label in ("BomLA", "Sequential MAML"))
    assert not capsys.readouterr().out  # nothing is wrong with it


def test_folder_without_evaluation_is_reported(tmp_path):
    """A folder whose runs have no evaluation yet is reported as such, and gets no report."""
    assert data_prep.report(tmp_path) == f"{tmp_path} holds no evaluation yet" and not list(tmp_path.iterdir())


def claims_in(text):
    """Section, left variant and key, sign, right variant and key, margin of each claim."""
    for line in text.strip().split("\n"):
        section, a, *key_a, sign, b, key_b, of = (words := line.split())[:8]
        assert len(words) == 8 or (len(words) == 10 and words[8] in "+-")
        yield section, a, " ".join(key_a), sign, b, f"{key_b} {of}", int("".join(words[8:]) or 0), line


ALL_CLAIMS = {name: data_prep.spell_out(getattr(data_prep, name), ["d0", "d1"]) for name in ("CLAIMS", "TASK_CLAIMS")}
EVERY_CLAIM = [(name, *claim) for name, claims in ALL_CLAIMS.items() for claim in claims_in(claims)]


def test_every_claim_is_read():
    """With all runs there, each line of the claims is a row of the verdicts, in its own words."""
    for name, claims in ALL_CLAIMS.items():
        variants = {v for _, a, _, _, b, *_ in claims_in(claims) for v in (a, b)}
        values = np.full((8, 1) if name == "TASK_CLAIMS" else (3, 3), 0.5).tolist()
        runs = {(v, 0): made_up(v, 0, values, 0.5 if v == "toe" else None) for v in variants}
        rows = [row.split(" | ") for row in data_prep.verdicts(runs, claims).split("\n")[2:]]
        assert [f"{section[2:]} {claim}" for section, claim, *_ in rows] == claims.strip().split("\n")


def test_claims_of_absent_runs_are_counted():
    """A claim on a method that was not run, or on a point not reached, is left out and counted, not called open."""
    claims = ALL_CLAIMS["CLAIMS"]
    runs = {("maml", 0): made_up("maml", 0, [[0.8, 0.3, 0.3], [0.7, 0.5, 0.3], [0.6, 0.4, 0.5]]),
            ("bomvi", 0): made_up("bomvi", 0, 3 * [[0.8, 0.3, 0.3]])[:3]}
    table, left_out = data_prep.verdicts(runs, claims).split("\n\n")
    rows = table.split("\n")[2:]
    assert [row.split(" | ")[1] for row in rows] == ["maml own d0 > maml end d0", "maml own d1 > maml end d1"]
    missing = len(claims.strip().split("\n")) - 2
    assert left_out == f"Claims left out, since their runs are not here or not done: {missing}"


def test_claims_are_of_runs_that_can_be_had():
    """Each variant that a claim speaks of is a run that its experiment's command line can give."""
    studies = (("triathlon", "1,100,1000", ALL_CLAIMS["CLAIMS"]), ("omniglot", "0.01,1,100", ALL_CLAIMS["TASK_CLAIMS"]))
    for command, weights, claims in studies:
        variants = {args.job.variant for args in runs_of(command, "--past-weight", weights)}
        assert {v for _, a, _, _, b, *_ in claims_in(claims) for v in (a, b)} <= variants


CELLS = {  # (stage, dataset) of a key, with three datasets, or with a sequence of eight tasks
    "own new": [(1, 1), (2, 2)], "end past": [(2, 0), (2, 1)], "end last": [(2, 2)],
    "end all": [(2, 0), (2, 1), (2, 2)], "early last": [], "first tasks": [(0, 0), (1, 0)],
    "last tasks": [(6, 0), (7, 0)], "own first": [(0, 0)], "next first": [(1, 0)], "own d0": [(0, 0)],
    "own d1": [(1, 1)], "end d0": [(2, 0)], "end d1": [(2, 1)]}


def runs_apart(left, right, apart, tasks):
    """Runs of a seed for each number in `apart`, in which left is that many points above right, and what both share
    changes from seed to seed."""
    runs = {}
    for seed, points in enumerate(apart):
        for variant in {left[0], right[0]}:
            level, early = 0.4 + 0.1 * seed, 0.05
            values = np.full((8, 1) if tasks else (3, 3), level)
            for (v, key), sign in ((left, 1), (right, -1)):
                if v == variant:
                    for cell in CELLS[key]:
                        values[cell] = level + sign * points / 200
                    early = level + sign * points / 200 if key == "early last" else early
            runs[variant, seed] = made_up(variant, seed, values.tolist(), early if variant == "toe" else None)
    return runs


@pytest.mark.parametrize("name, section, a, key_a, sign, b, key_b, margin, line", EVERY_CLAIM,
                         ids=[claim[-1] for claim in EVERY_CLAIM])
def test_claim_comes_out_each_way(name, section, a, key_a, sign, b, key_b, margin, line):
    """The verdict on a claim follows its sign, its margin and the interval over seeds of left minus right."""
    above, below = ("holds", "fails") if sign == ">" else ("fails", "holds")
    for apart, expected in (
        ([0.9, 1.0, 1.1], above), ([-1.1, -1.0, -0.9], below),
        ([-6, 1, 8], "inconclusive"), ([-8, -1, 6], "inconclusive"),
        ([20, 20.2], "inconclusive"), ([-20, -20.2], "inconclusive"), ([20], "inconclusive"),
    ):
        apart = [margin + points for points in apart]
        runs = runs_apart((a, key_a), (b, key_b), apart, name == "TASK_CLAIMS")
        claims = ALL_CLAIMS[name]
        rows = [row.strip("| ").split(" | ") for row in data_prep.verdicts(runs, claims).split("\n")]
        (row,) = (row for row in rows if row[:2] == line.split(" ", 1))
        shown = f"{np.mean(apart):+.1f}{' ± ' * (len(apart) > 2)}"
        assert row[3:] == [str(len(apart)), expected], (apart, row)
        assert row[2].startswith(shown) and "inf" not in row[2], (apart, row)


def test_claims_are_paired_over_seeds(tmp_path, known):
    """A claim that compares methods takes the difference seed by seed, of the seeds that both have finished."""
    runs = [made_up(m, s, [[0.8, 0.3], [0.3 + gain + 0.2 * s, 0.5]])
            for m, gain in (("maml", 0), ("bomla", 0.1)) for s in (0, 1, 2)]
    late = made_up("maml", 3, TWO)
    late[2]["iteration"] = late[3]["iteration"] = 5
    put(tmp_path, *runs, made_up("bomla", 3, TWO), late, made_up("bomla", 4, TWO))
    data_prep.report(tmp_path)
    found = (tmp_path / "report.md").read_text()
    assert "\n| 6.1 | bomla end d0 > maml end d0 | +10.0 ± 0.0 | 3 | holds |\n" in found


def test_claims_speak_of_each_past_dataset(tmp_path, known):
    """Forgetting is judged for each dataset but the last: what one gains does not make up for what another loses."""
    put(tmp_path, *(made_up("maml", s, [[0.9, 0.3, 0.3], [0.9, 0.5, 0.3], [0.7, 0.8, 0.5]]) for s in range(3)))
    data_prep.report(tmp_path)
    found = [row for row in (tmp_path / "report.md").read_text().split("\n") if "| maml own d" in row]
    assert found == ["| 6.1 | maml own d0 > maml end d0 | +20.0 ± 0.0 | 3 | holds |",
                     "| 6.1 | maml own d1 > maml end d1 | -30.0 ± 0.0 | 3 | fails |"]


def test_other_datasets_have_no_claims(tmp_path):
    """A triathlon of which one dataset is the user's own is not held against the paper."""
    rows = made_up("maml", 0, TWO)
    put(tmp_path, [r | dict(datasets=["my-own", "d1"], evaluated=r["evaluated"].replace("d0", "my-own")) for r in rows])
    assert "| 80.0 -> 60.0 | 50.0 |" in data_prep.report(tmp_path)
    assert "claim" not in (tmp_path / "report.md").read_text().lower()


def test_claims_of_a_task_sequence(tmp_path):
    """Along a sequence of tasks the last quarter is compared with the first."""
    rise = lambda m, s: made_up(m, s, [[0.5 + 0.05 * t + 0.001 * s] for t in range(8)], experiment="omniglot")
    put(tmp_path, *(rise(m, s) for m in ("bomla", "toe") for s in (0, 1, 2)))
    table, found = data_prep.report(tmp_path), (tmp_path / "report.md").read_text()
    assert "\n| 6.2 | bomla last tasks > bomla first tasks | +30.0 ± 0.0 | 3 | holds |\n" in found
    assert "\n| 6.2 | toe last tasks < toe first tasks + 1 | +30.0 ± 0.0 | 3 | fails |\n" in found
    assert "\n| method | seeds | after task 2 | after task 4 | after task 6 | after task 8 |\n" in table
    assert "\n| BomLA | 3 | 55.1 ± 0.2 | 65.1 ± 0.2 | 75.1 ± 0.2 | 85.1 ± 0.2 |\n" in table


def test_report_needs_only_the_records(tmp_path, capsys, known):
    """The report of every experiment in a folder comes from its records alone."""
    put(tmp_path / "triathlon", *(made_up("maml", s, [[0.9, 0.3], [0.4 + 0.01 * s, 0.5]]) for s in range(3)))
    put(tmp_path / "run", made_up("toe", 0, TWO, experiment="run"))
    data_prep.main(["report", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "triathlon, real data, cpu schedule" in text and "run, real data, cpu schedule" in text
    found = (tmp_path / "triathlon" / "report.md").read_text()
    assert "\n| 6.1 | maml own d0 > maml end d0 | +49.0 ± 2.5 | 3 | holds |\n" in found
    assert all((tmp_path / name / "accuracy.svg").exists() for name in ("triathlon", "run"))


@pytest.mark.parametrize("out", ["", "runs", "runs/demo", "runs/demo/run"])
def test_report_finds_records_at_any_depth(out, tmp_path, capsys):
    """A report on a folder is of the runs of every experiment in it, however deep, or of the one that it is."""
    put(tmp_path / "runs/demo/run", made_up("maml", 0, TWO, experiment="run"))
    data_prep.main(["report", "--out", str(tmp_path / out)])
    assert "| Sequential MAML | 1 |" in capsys.readouterr().out
    assert (tmp_path / "runs/demo/run/report.md").exists()


def test_sequence_of_ones_own_has_no_claims(tmp_path):
    """A sequence of the user's own is not held against the paper."""
    put(tmp_path, *(made_up(m, s, TWO, experiment="run") for m in ("maml", "bomla") for s in range(3)))
    data_prep.report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| BomLA | 3 | 80.0 -> 60.0 ± 0.0 | 50.0 ± 0.0 |" in text
    assert not re.search("claim|verdict|holds|fails|inconclusive", text)


@pytest.mark.parametrize("experiment", ["run", "triathlon", "omniglot"])
def test_one_dataset_is_reported(experiment, tmp_path):
    """A sequence of one dataset, or of one task, has a table and a figure."""
    put(tmp_path, made_up("maml", 0, [[0.7]], experiment=experiment))
    text = data_prep.report(tmp_path)
    assert "| Sequential MAML | 1 | 70.0 |" in text and (tmp_path / "accuracy.svg").exists()
    assert (tmp_path / "report.md").read_text().count("| inconclusive |") == (experiment == "omniglot")


FOREIGN = {
    "a number": b"5\n",
    "not UTF-8": json.dumps(made_up("bomla", 0, TWO)[0]).encode().replace(b"real", b"\xff\xfe") + b"\n",
    "cut off": json.dumps(made_up("bomla", 0, TWO)[0]).encode()[:-20],
    "accuracy 9.95": made_up("bomla", 0, TWO, accuracy=9.95),
    "accuracy nan": made_up("bomla", 0, TWO, accuracy=math.nan),
    "unknown method": made_up("bomla", 0, TWO, method="reptile"),
    "no stage": [{k: v for k, v in row.items() if k != "stage"} for row in made_up("bomla", 0, TWO)],
    "seed of letters": made_up("maml", "zero", TWO),
    "lambda of letters": made_up("bomla@x", 0, TWO),
    "no settings": [{k: v for k, v in row.items() if k != "settings"} for row in made_up("bomla", 0, TWO)],
    "settings in a list": made_up("bomla", 0, TWO, settings=["a"]),
    "revision of a number": made_up("bomla", 0, TWO, revision=3),
    "other datasets": made_up("bomla", 0, TWO, datasets=["e0", "e1"], evaluated="e0", settings="87654321"),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_foreign_record_is_left_out(how, tmp_path, capsys):
    """A record that cannot be one of this table is named and left out, and the others are reported."""
    put(tmp_path, made_up("maml", 0, TWO), made_up("toe", 0, TWO))
    rows = FOREIGN[how]
    odd = rows[0] if isinstance(rows, list) else dict(variant="bomla", seed=0)
    path = tmp_path / f"{odd['variant']}-{odd['seed']}" / "record.jsonl"
    path.parent.mkdir()
    path.write_bytes(rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode())
    text, said = data_prep.report(tmp_path), capsys.readouterr().out
    assert said.count("left out") == 1 and f"left out: {path} (" in said
    table = [line for line in text.split("\n") if line.startswith("|")][2:]
    assert table == [f"| {label} | 1 | 80.0 -> 60.0 | 50.0 |" for label in ("Sequential MAML", "Train-On-Everything")]


def test_copy_of_a_record_is_left_out(tmp_path, capsys):
    """A record in a folder of another name, such as a backup, does not replace the run's own."""
    put(tmp_path, made_up("maml", 0, TWO))
    (tmp_path / "maml-0.old").mkdir()
    copy = made_up("maml", 0, [[0.1, 0.1], [0.1, 0.1]])
    (tmp_path / "maml-0.old/record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copy))
    assert "| Sequential MAML | 1 | 80.0 -> 60.0 | 50.0 |" in data_prep.report(tmp_path)
    assert re.fullmatch(r"left out: \S+/maml-0\.old/record\.jsonl \(.*\)\n", capsys.readouterr().out)


def test_method_of_ones_own_is_reported(tmp_path):
    """The records of a method that only its author's script knows are reported under its name, after the others."""
    put(tmp_path, made_up("diagonal", 0, TWO), made_up("diagonal@7", 0, TWO), made_up("maml", 0, TWO))
    labels = re.findall(r"^\| (.*?) \| 1 \|", data_prep.report(tmp_path), re.M)
    assert labels == ["Sequential MAML", "diagonal", "diagonal, lambda = 7"]


def test_records_of_other_settings_are_left_out(tmp_path, capsys):
    """A report on a command's settings names and leaves out the runs of others."""
    put(tmp_path, made_up("maml", 0, TWO), made_up("bomla", 0, TWO, settings="87654321"))
    assert set(data_prep.read_records(tmp_path, "87654321")) == {("bomla", 0)}
    assert re.search(r"^left out: \S+/maml-0/record\.jsonl \(", capsys.readouterr().out)
    assert not data_prep.read_records(tmp_path, "other")


def test_table_of_validation_classes_says_so(fake_data, tmp_path):
    """A run evaluated on validation classes is not shown as one on test classes."""
    for split, says_so in (("val", True), ("test", False)):
        work_here("run", "--sequence", "mini_quickdraw", "--data", fake_data, *SMALL, "--methods", "maml", "--split", split,
                  "--out", tmp_path / split)
        assert ("validation classes" in data_prep.report(tmp_path / split / "run")) == says_so


def test_report_is_of_one_setting(tmp_path):
    """Without a command's settings a report is on those that most of the records have."""
    put(tmp_path, made_up("maml", 0, TWO), made_up("bomla", 0, TWO, settings="87654321"), made_up("toe", 0, TWO))
    assert set(data_prep.read_records(tmp_path)) == {("maml", 0), ("toe", 0)}


def test_several_revisions_are_said(tmp_path):
    """A table of runs of several revisions names them; one of a single revision does not."""
    put(tmp_path, made_up("maml", 0, TWO, revision="abc"), made_up("toe", 0, TWO, revision="abc"))
    assert "revision" not in data_prep.report(tmp_path)
    put(tmp_path, made_up("bomla", 0, TWO, revision="def-dirty"))
    assert "Runs of several revisions: abc, def-dirty." in data_prep.report(tmp_path)


def test_settings_know_the_images(tmp_path):
    """Runs on other images, labels, class names or splits of the same name are runs of other settings."""
    args, found = boml.parse(["triathlon"]), []
    for change in ("none", "images", "split", "labels", "classes"):
        folder = tmp_path / change
        pack(folder, "cifar_fs", (6, 6, 6), (28, 28, 3))
        with np.load(folder / "cifar_fs.npz") as z:
            arrays = dict(z)
        if change == "images":
            arrays["images"][5, 7, 9, 1] ^= 1
        elif change == "split":
            arrays["split"] = np.repeat(boml.SPLITS[::-1], 6)
        elif change == "labels":
            arrays["labels"] = arrays["labels"][::-1]
        elif change == "classes":
            arrays["classes"] = arrays["classes"][::-1]
        np.savez(folder / "cifar_fs.npz", **arrays)
        found.append(boml.shared_facts(args, [load("cifar_fs", folder)])["settings"])
    assert len(set(found)) == 5


# ----------------------------------------------------------------------------------------------------- Figure

HOSTILE = "<&>'\""


class Panels:
    """The figure of some runs, by its panels: the grid, what is shaded, dashed and drawn, the words."""

    def __init__(self, runs):
        root = ElementTree.fromstring(data_prep.figure(runs))
        space = "{http://www.w3.org/2000/svg}"
        assert root.tag == f"{space}svg"
        self.words = [e.text for e in root.iter(f"{space}text")]
        paths = [dict(e.attrib, points=self.points(e.attrib["d"])) for e in root.iter(f"{space}path")]
        (self.left, _), (self.right, _) = next(p["points"] for p in paths if p["stroke"] == "#ddd")
        grid = []  # of each panel: pixels by percent, from the numbers beside it
        for line, number in itertools.pairwise(root):
            if line.get("stroke") == "#ddd":
                percent, y = int(number.text), self.points(line.attrib["d"])[0][1]
                assert abs(float(number.attrib["y"]) - 4 - y) < 1
                grid += [{}] if not grid or percent < max(grid[-1]) else []
                grid[-1][percent] = y
        for panel in grid:
            assert list(panel) == list(range(min(panel), max(panel) + 1, 10))
            assert len(np.unique(np.diff(list(panel.values())).round(1))) == 1
        self.low, self.high = ([end(panel) / 100 for panel in grid] for end in (min, max))
        self.bottom, self.top = ([panel[end(panel)] for panel in grid] for end in (min, max))
        self.T, self.panels = next(iter(runs.values()))[0]["stages"], len(grid)
        kind = lambda key, value: [p for p in paths if p.get(key) == value]
        self.shaded, self.dashed = kind("fill", "#eee"), kind("stroke-dasharray", "4")
        self.lines, self.bands = kind("stroke-linecap", "round"), kind("opacity", "0.2")

    @staticmethod
    def points(d):
        """The corners of a path of the commands M, L and h."""
        d = d.removesuffix("h0")  # which makes a dot of a single point
        if "h" in d:
            (x, y), by = map(float, d[1:].split("h")[0].split()), float(d.split("h")[1])
            return [(x, y), (x + by, y)]
        return [tuple(map(float, pair.split())) for pair in d[1:].split("L")]

    def panel_of(self, path):
        """The panel whose area holds all of the path."""
        x, y = np.array(path["points"]).T
        assert (self.left <= x).all() and (x <= self.right).all()
        inside = [n for n in range(self.panels) if self.top[n] - 0.05 <= y.min() and y.max() <= self.bottom[n] + 0.05]
        assert len(inside) == 1
        return inside[0]

    def place(self, panel, t, accuracy):
        """Where stages t and an accuracy are in a panel."""
        part = (accuracy - self.low[panel]) / (self.high[panel] - self.low[panel])
        return (self.left + (self.right - self.left) * t / self.T,
                self.bottom[panel] + (self.top[panel] - self.bottom[panel]) * part)


def figure_runs(n, variants=("maml", "bomla@1000", "bomla", "toe"), seeds=(0, 1)):
    """Runs on n datasets of hostile names, their accuracies apart by 0.2 between two seeds."""
    names = [f"{HOSTILE}{j}{HOSTILE}" for j in range(n)]
    runs = {}
    for v in variants:
        for s in seeds:
            rows = made_up(v, s, [[0.3 + 0.02 * j + 0.01 * t + 0.2 * s for j in range(n)] for t in range(n)])
            runs[v, s] = [r | dict(datasets=names, evaluated=names[int(r["evaluated"][1:])]) for r in rows]
    return runs, names


@pytest.mark.parametrize("n", [1, 16])
def test_figure_is_well_formed(n, tmp_path):
    """The figure is XML whatever the datasets are called, and names them all, the title and the variants."""
    runs, names = figure_runs(n)
    found = Panels(runs)
    assert found.panels == n
    title = "triathlon, real data, cpu schedule: accuracy in % along the training"
    for word in (*names, title, "Sequential MAML", "BomLA", "BomLA, lambda = 1000", "Train-On-Everything"):
        assert word in found.words
    put(tmp_path, *([row | dict(experiment="run") for row in rows] for rows in runs.values()))
    data_prep.report(tmp_path)
    assert ElementTree.parse(tmp_path / "accuracy.svg").getroot().tag.endswith("svg")


def names_in(path):
    """The words of a figure, its variants among them."""
    return {e.text for e in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")}


def test_lambda_has_a_figure_of_its_own(tmp_path):
    """accuracy.svg has the methods at the experiment's lambda, lambda.svg the methods whose lambda varies, by lambda."""
    variants = ("maml", "bomla", "bomla@1", "bomla@1000", "bomvi")
    put(tmp_path, *(made_up(v, 0, [[0.5]]) for v in variants))
    data_prep.report(tmp_path)
    labels = {data_prep.label_of(v) for v in (*variants, "bomla@100")}
    accuracy, by_lambda = (names_in(tmp_path / f) & labels for f in ("accuracy.svg", "lambda.svg"))
    assert accuracy == {"Sequential MAML", "BomLA", "BomVI"}
    assert by_lambda == {f"BomLA, lambda = {value}" for value in (1, 100, 1000)}


def test_figure_of_an_odd_lambda_alone(tmp_path):
    """Where no run has the experiment's lambda, accuracy.svg has those that there are."""
    put(tmp_path, made_up("bomla@1", 0, [[0.5]]))
    data_prep.report(tmp_path)
    assert "BomLA, lambda = 1" in names_in(tmp_path / "accuracy.svg")


def test_one_lambda_has_no_figure_of_its_own(tmp_path):
    """Without variants of lambda there is no lambda.svg."""
    put(tmp_path, made_up("maml", 0, [[0.5]]), made_up("bomla", 0, [[0.5]]))
    data_prep.report(tmp_path)
    assert not (tmp_path / "lambda.svg").exists()


@pytest.mark.parametrize("n", [1, 16])
def test_figure_has_a_line_per_variant_and_panel(n):
    """Each panel has a line of its own colour for each variant; for Train-On-Everything, which starts anew, one per
    stage."""
    runs, names = figure_runs(n)
    found = Panels(runs)
    count = Counter((found.panel_of(p), p["stroke"]) for p in found.lines)
    colours = {v: data_prep.COLOURS[v] for v in ("maml", "bomla", "toe")}
    other = {colour for _, colour in count} - set(colours.values())
    assert len(set(colours.values())) == 3 and len(other) == 1
    for panel in range(n):
        assert [count.pop((panel, colours[v])) for v in ("maml", "bomla", "toe")] == [1, 1, n]
        assert count.pop((panel, *other)) == 1
    assert not count


def test_figure_has_the_accuracies():
    """A line goes through the means over seeds at their places, its band through one standard deviation about them."""
    runs, names = figure_runs(3, ["maml"])
    found = Panels(runs)
    assert len(found.lines) == len(found.bands) == 3
    for line, band in zip(found.lines, found.bands):
        j = found.panel_of(line)
        mean = [0.3 + 0.02 * j + 0.01 * t + 0.1 for t in range(3)]
        assert_close(line["points"], [found.place(j, t + 1, a) for t, a in enumerate(mean)], atol=0.1)
        edges = [*enumerate(mean), *[(t, a - 0.2) for t, a in enumerate(mean)][::-1]]
        assert_close(band["points"], [found.place(j, t + 1, a + 0.1) for t, a in edges], atol=0.1)


@pytest.mark.parametrize("n", [1, 16])
def test_figure_shades_the_own_stage(n):
    """In the panel of a dataset its own stage is shaded, from bottom to top, and nothing else."""
    runs, names = figure_runs(n)
    found = Panels(runs)
    assert len(found.shaded) == n
    for j, area in enumerate(found.shaded):
        corners = {found.place(j, t, a) for t in (j, j + 1) for a in (found.low[j], found.high[j])}
        assert_close(sorted(area["points"]), sorted(corners), atol=0.1)


@pytest.mark.parametrize("n, way", [(1, 5), (16, 5), (3, 2), (3, 20)])
def test_figure_has_a_line_at_chance(n, way):
    """Each panel has a dashed line across it at the accuracy of guessing, 1 / N."""
    runs, _ = figure_runs(n)
    found = Panels({key: [row | dict(way=way) for row in rows] for key, rows in runs.items()})
    assert len(found.dashed) == n
    for j, line in enumerate(found.dashed):
        assert_close(line["points"], [found.place(j, 0, 1 / way), found.place(j, n, 1 / way)], atol=0.1)


def test_figure_of_tasks_all_right_or_none_ended():
    """The figure of a task sequence is drawn also where all answers are right and where no task has ended."""
    rows = made_up("bomla", 0, [[1.0]] * 8)
    found = Panels({("bomla", 0): rows})
    assert found.top[0] < found.bottom[0] and found.panel_of(found.lines[0]) == 0
    assert not Panels({("bomla", 0): [row | dict(iterations=10**6) for row in rows]}).lines


@pytest.mark.parametrize("way", [2, 5])
def test_figure_panels_reach_as_far_as_their_curves(way):
    """A panel holds its band and chance, which may be above it, and ends less than ten points beyond them."""
    runs, _ = figure_runs(3, ["maml"])
    found = Panels({key: [row | dict(way=way) for row in rows] for key, rows in runs.items()})
    for j, band in enumerate(found.bands):
        accuracies = [0.3 + 0.02 * j + a for a in (0, 0.22)] + [1 / way]  # mean -+ sd of the first and last stage
        assert found.low[j] <= min(accuracies) < found.low[j] + 0.1
        assert found.high[j] - 0.1 < max(accuracies) <= found.high[j]
        assert found.panel_of(band) == j


def test_figure_of_a_task_sequence():
    """The figure of a task sequence has one panel with a line per variant through the ends of all tasks, no stage
    shaded, no chance, and names the tasks."""
    runs = {(v, 0): made_up(v, 0, [[0.3 + 0.05 * t] for t in range(8)]) for v in ("bomla", "toe")}
    for (v, _), rows in runs.items():
        runs[v, 0] = [dict(r, iteration=i, iterations=9, accuracy=r["accuracy"] - (9 - i) / 100)
                      for r in rows for i in (3, 9)]
    found = Panels(runs)
    assert found.panels == 1 and len(found.lines) == 2 and not found.shaded and not found.dashed
    for line in found.lines:
        assert_close(line["points"], [found.place(0, t + 1, 0.3 + 0.05 * t) for t in range(8)], atol=0.1)
    assert {"task 2", "task 4", "task 6", "task 8"} <= set(found.words)


# ----------------------------------------------------------------------------------------------- README, figures


def test_readme_adds_a_method(fake_data, tmp_path, monkeypatch):
    """The README's method of one's own runs, carries its posterior through a checkpoint and penalises moving away."""
    monkeypatch.setattr(boml, "METHODS", dict(boml.METHODS))
    exec(re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)[1], dict(__name__="readme"))
    work_here("run", "--sequence", "omniglot,mini_quickdraw", "--data", fake_data, *SMALL, "--methods", "diagonal",
              "--out", tmp_path)
    state = state_of(tmp_path / "run/diagonal-0")
    posterior = boml.METHODS["diagonal"].posterior(toy_config(channels=3), state["theta"])
    posterior.load(state["posterior"])
    assert posterior.penalty(state["theta"])[0] == 0
    value, grads = posterior.penalty({n: v.detach() + 0.1 for n, v in state["theta"].items()})
    assert value > 0 and all((g > 0).all() for g in grads)


def test_readme_next_dataset(tmp_path, monkeypatch, forks):
    """The README's commands for datasets that arrive one by one run as they stand there, on tiny folders."""
    section = (HERE / "README.md").read_text().split("\n## The next dataset\n")[1].split("\n## ")[0]
    commands = re.search(r"```bash\n(.*?)```", section, re.S)[1]
    tiny = [*SMALL, *"--iterations 1 --inner-steps 1 --eval-steps 1 --eval-tasks 1 --out runs".split()]
    own_folder(tmp_path / "january", 12), own_folder(tmp_path / "february", 12)
    own_folder(tmp_path / "march/labelled", 5, 1), own_folder(tmp_path / "march/images", 5, 6)
    monkeypatch.chdir(tmp_path)
    for command in commands.splitlines():
        if command.startswith("rm -r "):
            shutil.rmtree(command.split()[2])
        else:
            program, script, *args = command.split()
            assert (program, script) == ("bash", "run.sh")
            data_prep.main(args if args[0] == "classify" else ["launch", *args, *tiny])  # of two values the later counts
    assert sorted(p.name for p in tmp_path.iterdir()) == ["march", "predictions.csv", "runs"]


def test_readme_tables_are_those_of_the_reports():
    """Each row of a table in the README under the name of a report is a line of that report."""
    readme = (HERE / "README.md").read_text()
    parts = re.split(r"<!-- (figures/\S+/report\.md) -->", readme)
    assert len(parts) > 1, "no table in the README names its report"
    for path, section in zip(parts[1::2], parts[2::2]):
        rows = [line for line in re.split(r"<!--|\n#", section)[0].split("\n") if line.startswith("|")]
        assert len(rows) > 2, f"no table under {path}"
        report = (HERE / path).read_text().split("\n")
        assert [row for row in rows if row not in report] == []


def test_reports_follow_from_the_records(tmp_path):
    """Each committed report and figure is what the records committed beside it give."""
    folders = sorted({path.parents[1] for path in HERE.glob("figures/*/*/record.jsonl")})
    assert folders, "no records are committed"
    for folder in folders:
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.md", "*.svg"))
        data_prep.report(copy)
        made, kept = ({p.name: p.read_text() for p in where.iterdir() if p.is_file()} for where in (copy, folder))
        assert made.keys() == kept.keys() and [name for name in made if made[name] != kept[name]] == [], folder


# -------------------------------------------------------------------------------------------------- Bad input


def own_folder(path, classes, each=4):
    rng = np.random.default_rng(0)
    for c in range(classes):
        (path / f"class {c}").mkdir(parents=True)
        for i in range(each):
            picture = Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8))
            picture.convert(("L", "RGB", "P")[c % 3]).save(path / f"class {c}" / f"{i}.png")
    return path


@pytest.fixture(scope="module")
def bad_things(fake_data, tmp_path_factory):
    """A folder with what the rows of BAD name: folders of one's own, datasets, runs and records, most with a fault."""
    here = tmp_path_factory.mktemp("bad")
    good = own_folder(here / "mine", 14)

    def spoilt(name, spoil):
        spoil(shutil.copytree(good, here / name) / "class 3")

    jpeg = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(jpeg, "JPEG")
    spoilt("broken", lambda c: (c / "0.png").write_bytes(b"\x89PNG\r\n"))
    spoilt("cut", lambda c: (c / "0.jpg").write_bytes(jpeg.getvalue()[:-900]))
    spoilt("large", lambda c: (c / "0.png").write_bytes(bomb((20000, 20000))))
    spoilt("deep", lambda c: Image.fromarray(np.full((28, 28), 40000, np.uint16)).save(c / "0.png"))
    spoilt("fifo", lambda c: os.mkfifo(c / "x.jpg"))
    spoilt("zero", lambda c: (c / "x.jpg").symlink_to("/dev/zero"))
    spoilt("leaving", lambda c: (c / "x.jpg").symlink_to(good / "class 0" / "0.png"))
    spoilt("loop", lambda c: (c / "x.jpg").symlink_to("x.jpg"))
    spoilt("folder", lambda c: (c / "x.jpg").mkdir())
    spoilt("empty", lambda c: (c.parent / "nothing").mkdir())
    spoilt("heic", lambda c: [path.rename(path.with_suffix(".HEIC")) for path in c.iterdir()])
    shutil.copytree(good, here / "other" / "mine")
    own_folder(here / "three", 3), own_folder(here / "one", 1, 1), own_folder(here / "six", 6, 1)
    (here / "none").mkdir(), (here / "text").write_text("hello")
    for name, content in (("half", (fake_data / "cifar_fs.npz").read_bytes()[:3000]), ("void", b"")):
        (here / name).mkdir()
        (here / name / "cifar_fs.npz").write_bytes(content)
    (here / "pipe").mkdir(), os.mkfifo(here / "pipe/cifar_fs.npz")
    pack(here / "few", "cifar_fs", (25, 25, 4), (28, 28, 3))
    work_here("run", "--sequence", "omniglot", "--data", fake_data, *SMALL, "--methods", "maml", "--out", here)
    for name in ("unreadable", "foreign"):
        (here / name).mkdir()
        shutil.copy(here / "run/maml-0/checkpoint.pt", here / name / "checkpoint.before.pt")
        state = state_of(here / "run/maml-0") | dict(theta=5)
        (here / name / "checkpoint.pt").write_bytes(b"hello" if name == "unreadable" else saved(state))
    (here / "two").mkdir()
    state["settings"]["channels"] = 2
    (here / "two/checkpoint.pt").write_bytes(saved(state | dict(theta={})))
    put(here / "reported" / "run", made_up("maml", 0, TWO))
    (here / "reported" / "run" / "report.md").mkdir()
    return here


def bad(line, sentence):
    return pytest.param(line.split(" "), sentence, id=line)


TELL = "classify --from run/maml-0 --labelled mine --images mine"
BAD = [  # a command line, and what its sentence says
    bad("", "invalid choice: ''"),
    bad("marathon", "'marathon'"),
    bad("triathlon more", "unrecognized arguments: more"),
    bad("triathlon --colour red", "--colour"),
    bad("triathlon --s 1", "unrecognized arguments: --s 1"),
    bad("triathlon --past 1", "unrecognized arguments: --past 1"),
    bad("triathlon --seed 1", "['--seed'] is for boml.py; here it is --methods or --seeds"),
    bad("triathlon --method=maml", "['--method=maml'] is for boml.py; here it is --methods or --seeds"),
    bad("run", "run needs --sequence"),
    # options
    bad("triathlon --methods maml,reptile", "--methods: 'reptile' is not one of maml"),
    bad("triathlon --methods maml,", "--methods: '' is not one of maml"),
    bad("triathlon --methods MAML", "--methods: 'MAML' is not one of maml"),
    bad("triathlon --methods maml,maml", "--methods, --seeds or --past-weight repeats one"),
    bad("triathlon --seeds 0,x", "--seeds: invalid list value: '0,x'"),
    bad("triathlon --seeds 1,1", "--methods, --seeds or --past-weight repeats one"),
    bad("triathlon --seeds 0,٠", "--methods, --seeds or --past-weight repeats one"),
    bad("triathlon --seeds=-1", "--seed is -1; it must be from 0 to"),
    bad("triathlon --seeds " + 5000 * "9", "--seeds: invalid list value"),
    bad("triathlon --schedule gpu", "'gpu'"),
    bad("triathlon --split train", "--split: invalid choice: 'train'"),
    bad("triathlon --jobs=-1", "--jobs is -1; it must be from 1 to"),
    bad("triathlon --jobs 0", "--jobs is 0; it must be from 1 to"),
    bad("triathlon --device hpu", "--device: invalid choice: 'hpu'"),
    bad("triathlon --device meta", "--device: invalid choice: 'meta'"),
    bad("triathlon --iterations many", "--iterations: invalid list value: 'many'"),
    bad("triathlon --iterations ,", "--iterations: invalid list value: ','"),
    bad("triathlon --iterations 0", "--iterations is 0; it must be from 1 to"),
    bad("triathlon --iterations 1e3", "--iterations: invalid list value: '1e3'"),
    bad("triathlon --eval-tasks 99999999999999999999999", "--eval-tasks is 99999999999999999999999; it must be from"),
    bad("triathlon --eval-every 0", "--eval-every is 0; it must be from 1 to"),
    bad("triathlon --inner-steps 0", "--inner-steps is 0; it must be from 1 to"),
    bad("triathlon --inner-steps 1.5", "--inner-steps: invalid list value: '1.5'"),
    bad("triathlon --inner-rate fast", "--inner-rate: invalid list value: 'fast'"),
    bad("triathlon --inner-rate inf", "--inner-rate is inf; it must be from 0 to 1000000"),
    bad("triathlon --inner-rate 0.1,0.2", "--inner-rate has 2 values for 3 datasets"),
    bad("triathlon --outer-rate nan", "--outer-rate is nan; it must be from 0 to"),
    bad("triathlon --jacobian-rate abc", "--jacobian-rate: invalid float value: 'abc'"),
    bad("triathlon --kl-weight nan", "--kl-weight is nan"),
    bad("triathlon --kl-weight abc", "--kl-weight"),
    bad("triathlon --past-weight 1,x", "--past-weight: invalid list value: '1,x'"),
    bad("triathlon --past-weight 1,-1", "--past-weight is -1.0; it must be from 1e-09 to"),
    bad("triathlon --past-weight 1e300", "--past-weight is 1e+300; it must be from 1e-09 to 1000000"),
    bad("triathlon --past-weight 2,2.0000001", "--methods, --seeds or --past-weight repeats one"),
    bad("triathlon --past-weight 1 --methods maml", "--past-weight is for bomla and bomvi"),
    bad("triathlon --way 1", "--way is 1; it must be from 2 to"),
    bad("triathlon --way 21", "cifar_fs has only 20 training or test classes, too few for --way 21; lower it"),
    bad("triathlon --shot 3", "too few for --shot 3 and --query 2"),
    bad("triathlon --query 15", "too few for --shot 1 and --query 15"),
    bad("triathlon --channels 1", "cifar_fs needs --channels 3"),
    bad("omniglot --shot 1 --sequence cifar_fs", "cifar_fs needs --channels 3"),
    bad("omniglot --shot 1 --sequence omniglot_alphabets,mini_quickdraw", "omniglot takes one dataset"),
    # data files
    bad("triathlon --sequence omniglot,mnist", "'mnist' is neither one of omniglot"),
    bad("run --sequence omniglot,", "'' is neither one of omniglot"),
    bad("run --sequence omniglot,omniglot", "two datasets are named omniglot"),
    bad("run --sequence cifar_fs --data text", "--data text is not a folder; name another"),
    bad("run --sequence cifar_fs --data pipe", "pipe/cifar_fs.npz is not there"),
    bad("run --sequence cifar_fs --data half", "half/cifar_fs.npz is damaged"),
    bad("run --sequence cifar_fs --data void", "void/cifar_fs.npz is damaged"),
    bad("run --sequence few/cifar_fs.npz", "few/cifar_fs.npz is not of a folder of one's own; use --data few --sequence cifar_fs"),
    bad("run --sequence cifar_fs --data few", "cifar_fs has only 4 training or test classes, too few for --way 5"),
    # folders of one's own
    bad("run --sequence text", "'text' is neither one of omniglot"),
    bad("run --sequence none", "none has 0 class folders"),
    bad("run --sequence three", "three has 3 class folders; --way 5 needs 10; add some, or use --way 2"),
    bad("run --sequence mine --way 50", "mine has 14 class folders; --way 50 needs 100; add some, or use --way 7"),
    bad("run --sequence mine,other/mine", "two datasets are named mine"),
    bad("run --sequence broken", "broken/class 3/0.png cannot be used as an image"),
    bad("run --sequence cut", "cut/class 3/0.jpg cannot be used as an image (image file is truncated"),
    bad("run --sequence large", "large/class 3/0.png cannot be used as an image (it has more than 67 million pixels)"),
    bad("run --sequence deep", "deep/class 3/0.png cannot be used as an image (it has more than 8 bits per channel)"),
    bad("run --sequence fifo", "fifo/class 3/x.jpg is not a regular file inside fifo"),
    bad("run --sequence zero", "zero/class 3/x.jpg is not a regular file inside zero"),
    bad("run --sequence leaving", "leaving/class 3/x.jpg is not a regular file inside leaving"),
    bad("run --sequence loop", "loop/class 3/x.jpg is not a regular file inside loop"),
    bad("run --sequence folder", "folder/class 3/x.jpg is not a regular file inside folder"),
    bad("run --sequence empty", "empty/nothing holds no images"),
    bad("run --sequence heic", "heic/class 3 holds no images that Pillow can read"),
    # results
    bad("run --sequence omniglot --out text", "Not a directory: 'text/run'"),
    bad("run --sequence omniglot --methods maml --start-from gone", "--start-from gone is not the folder of another run of maml"),
    bad("run --sequence omniglot --filters 4 --methods maml --start-from unreadable", "unreadable/checkpoint.pt is damaged "
        "(File is not a zip file); name another run, or delete it to use the one before, if any."),
    bad("run --sequence omniglot --filters 4 --methods maml --start-from foreign", "foreign/checkpoint.pt is damaged "
        "(it is not of a run); name another run, or delete it"),
    bad("run --sequence omniglot --methods maml --start-from run/maml-0", "another run of maml with the same --way, --channels and --filters"),
    bad("run --sequence omniglot --filters 4 --start-from run/maml-0 --methods bomla", "not the folder of another run"),
    bad("run --sequence omniglot --filters 4 --start-from run/maml-0 --methods maml,bomvi", "another run of bomvi"),
    bad("run --sequence omniglot --filters 4 --start-from run/maml-0 --methods maml --out .", "of another run of maml"),
    bad("report --out nowhere", "nowhere holds no records"),
    bad("report --out text", "text holds no records"),
    bad("report --out run/maml-0", "run/maml-0 holds no records"),
    bad("report --out reported", "reported/run/report.md cannot be written"),
    # classify
    bad("classify", "classify needs --from, a folder; it is None"),
    bad(TELL + " --from gone", "classify needs --from, a folder; it is gone"),
    bad(TELL + " --from none", "none has no checkpoint that can be read"),
    bad(TELL + " --from unreadable", "unreadable/checkpoint.pt is damaged (File is not a zip file); name another run"),
    bad(TELL + " --from foreign", "foreign/checkpoint.pt is damaged (it is not of a run); name another run"),
    bad(TELL + " --from two", "two has 2 channels; pictures have 1 or 3"),
    bad(TELL + " --labelled text", "classify needs --labelled, a folder; it is text"),
    bad(TELL + " --labelled none", "none has 0 class folders; put 2 or more there."),
    bad(TELL + " --labelled one", "one has 1 class folders; put 2 or more there."),
    bad(TELL + " --labelled six", "six has 6 class folders; the network of run/maml-0 can tell 5 apart; "
        "for more, train with --way 6."),
    bad(TELL + " --labelled three --images gone", "classify needs --images, a folder; it is gone"),
    bad(TELL + " --labelled three --images none", "none holds no image that can be read"),
    bad(TELL + " --labelled three --inner-rate inf", "--inner-rate is inf; it must be from 0 to"),
    bad(TELL + " --labelled three --eval-steps 0", "--eval-steps is 0; it must be from 1 to"),
]


@pytest.mark.parametrize("line, sentence", BAD)
def test_bad_input(line, sentence, bad_things, fake_data, monkeypatch, capsys):
    """A mistake in a command line or in what it names ends in one sentence that names it and status 2, before any run
    starts, with nothing written."""
    def start(*_):
        raise AssertionError("the runs would have started")

    monkeypatch.setattr(data_prep, "side_by_side", start)
    monkeypatch.chdir(bad_things)
    before = sorted(bad_things.rglob("*"))
    if line[0] not in ("report", "classify"):
        cut_off(monkeypatch)
        line = ["launch", *line[:1], "--data", str(fake_data), "--query", "2", "--out", "nowhere", *line[1:]]
    with pytest.raises(SystemExit) as end:
        boml.one_sentence(data_prep.main, line)
    said, = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and re.match("boml: .", said) and sentence in said
    assert sorted(bad_things.rglob("*")) == before


def test_values_per_dataset_are_checked_before_the_data():
    """A setting with a value for each dataset is refused when the command line is read, before any data is."""
    with pytest.raises(boml.Problem, match="has 2 values"):
        boml.parse(["triathlon", "--iterations", "3,4"])


def test_merge_rank_beyond_the_factors():
    """A rank that the factors cannot have is cut to the one they can."""
    g = torch.Generator().manual_seed(0)
    half = [torch.randn(4, n, n, generator=g, dtype=torch.double) for n in (5, 1)]
    block = tuple(f @ f.mT for f in half)
    merged = boml.merge(block, 3)
    assert len(merged[0]) == 1
    assert_close(dense(merged), dense(block), atol=1e-9)


def test_divergence_in_evaluation_is_reported():
    """An adaptation that runs away ends in a sentence that names the dataset."""
    data, cfg = toy_data(0, inner_rate=1e30, eval_steps=3), toy_config(channels=1)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    with pytest.raises(boml.Problem, match="adapting to omniglot diverged; try a smaller --inner-rate"):
        boml.evaluate(theta, boml.Posterior(cfg, theta), data, cfg, 0)


SPOILT = {
    "not uint8": lambda z: dict(images=z["images"].astype(np.float32)),
    "other size": lambda z: dict(images=z["images"][:, :27]),
    "labels too few": lambda z: dict(labels=z["labels"][1:]),
    "a class without images": lambda z: dict(labels=np.where(z["labels"] == 2, 1, z["labels"])),
    "labels of floats": lambda z: dict(labels=z["labels"].astype(float)),
    "a class twice": lambda z: dict(classes=np.array([*z["classes"][:-1], z["classes"][0]])),
    "unknown split": lambda z: dict(split=np.array([*z["split"][:-1], "exam"])),
    "no origin": lambda z: dict(origin=np.array([], str)),
    "pickled": lambda z: dict(classes=z["classes"].astype(object)),
}


@pytest.mark.parametrize("how", ["truncated", "empty", "missing key", *SPOILT])
def test_bad_data_file(how, fake_data, tmp_path):
    """A file that is not what it should be is named, with the way to make it again."""
    path = tmp_path / "cifar_fs.npz"
    whole = (fake_data / "cifar_fs.npz").read_bytes()
    if how in SPOILT:
        with np.load(fake_data / "cifar_fs.npz") as z:
            np.savez(path, **dict(z) | SPOILT[how](z))
    elif how == "missing key":
        np.savez(path, images=np.zeros((3, 28, 28), np.uint8))
    else:
        path.write_bytes(whole[: len(whole) // 2] if how == "truncated" else b"")
    with pytest.raises(boml.Problem, match=r"cifar_fs\.npz is damaged \(.*\); .* bash run\.sh data cifar_fs"):
        load("cifar_fs", tmp_path)


def test_data_file_that_may_not_be_read(fake_data, monkeypatch):
    """A file without read permission is not called damaged, nor is its deletion advised."""
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(boml.Problem, match=r"cifar_fs\.npz may not be read; change its permissions\."):
        load("cifar_fs", fake_data)


def test_own_folder_joins_a_sequence(fake_data, tmp_path, forks, capsys):
    """A folder of class folders is a dataset by its own name, also of pictures of several kinds."""
    own = own_folder(tmp_path / "my_images", 12)
    launch("run", "--sequence", f"omniglot,{own}", "--methods", "maml", "--data", fake_data, "--out", tmp_path / "out",
           *SMALL)
    text = capsys.readouterr().out
    assert "my_images (own): 5/2/5 classes, 48 images" in text and "run, real and own data" in text
    assert {r["evaluated"] for r in rows_of(tmp_path / "out/run/maml-0/record.jsonl")} == {"omniglot", "my_images"}


def test_linked_folder_goes_by_its_own_name(tmp_path):
    """A link to a folder is a dataset by the link's name, by which it may be gone later."""
    own_folder(tmp_path / "2024", 12)
    (tmp_path / "january").symlink_to(tmp_path / "2024")
    assert data_prep.pack_folder(tmp_path / "january", toy_config(way=5), tmp_path) == tmp_path / "january.npz"


@pytest.mark.parametrize("change", [
    lambda own: (own / "class 3").rename(own / "class 99"),
    lambda own: (own / "class 3/0.png").rename(own / "class 5/9.png")], ids=["renamed class", "moved image"])
def test_own_folder_that_changes_is_refused(change, tmp_path):
    """A run on a folder of one's own does not go on once a class has another name or an image another class."""
    own = own_folder(tmp_path / "mine", 12)
    line = ["run", "--sequence", own, "--methods", "maml", "--out", tmp_path / "out", *SMALL, "--shot", 1, "--query", 1]
    work_here(*line)
    change(own)
    with pytest.raises(boml.Problem, match=r"settings \(mine's checksum was '\w+', is '\w+'\); .* use another --out"):
        work_here(*line)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_cannot_be_shown(encoding, tmp_path, monkeypatch):
    """Folders whose names are not UTF-8 are learned and reported, whatever the terminal can show."""
    own = own_folder(tmp_path / os.fsdecode(b"bild\xe4r \xff"), 12)
    for c in range(6):
        (own / f"class {c}").rename(own / os.fsdecode(b"\xff%d" % c))
    (own / "class 7" / os.fsdecode(b"note.\xff")).touch()
    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    boml.one_sentence(work_here, "run", "--sequence", own, "--methods", "maml", "--out", tmp_path / "out", *SMALL)
    print(data_prep.report(tmp_path / "out/run"), flush=True)
    assert b"1 file(s) skipped" in output.buffer.getvalue() and b"| Sequential MAML | 1 |" in output.buffer.getvalue()


def test_photos_are_seen_as_people_see_them(tmp_path, capsys):
    """A photo is turned as its EXIF tag says, transparent parts are white, and files of other kinds are counted."""
    shade, turned = Image.linear_gradient("L").resize((40, 60)), Image.Exif()
    turned[0x112] = 6  # to be turned clockwise
    shade.transpose(Image.Transpose.ROTATE_90).save(own_folder(tmp_path, 1, 2) / "class 0/0.png", exif=turned)
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(tmp_path / "class 0/1.png")
    for n in "12":
        (tmp_path / f"class 0/{n}.HEIC").touch()
    x, _, _ = data_prep.read_classes(tmp_path, 1)
    assert_close(x[0], np.asarray(shade.resize((28, 28), Image.Resampling.BILINEAR)), atol=1)
    assert len(x) == 2 and (x[1] == 255).all()
    assert ": .HEIC: 2 file(s) skipped, Pillow cannot read them" in capsys.readouterr().out


def test_alphabets_smaller_than_a_task():
    """Alphabets with too few characters for a task are not evaluated on; if there is none, a sentence says so."""
    data = alphabets(0)
    with pytest.raises(boml.Problem, match="no alphabet has 6 characters; lower --way"):
        boml.task_sequence(data, toy_config(way=6), 0)
    names = [c if n < 60 else f"small {n // 2}/{n % 2}" for n, c in enumerate(data.classes)]
    _, judge = boml.task_sequence(data._replace(classes=names), toy_config(way=5), 0)
    assert judge.splits["test"].tolist() == list(range(50, 60))


def test_lambda_study_side_by_side(fake_data, tmp_path):
    """Several values of lambda are runs of their own beside the default's, in one table."""
    work_here("run", "--sequence", "omniglot,mini_quickdraw", "--data", fake_data, "--out", tmp_path, *SMALL,
              "--iterations", "1", "--methods", "bomla,bomvi", "--past-weight", "1,1000,3,100")
    text = data_prep.report(tmp_path / "run")
    labels = re.findall(r"^\| (.*?) \| 1 \|", text, re.M)
    assert labels == ["BomLA", "BomLA, lambda = 1", "BomLA, lambda = 3", "BomLA, lambda = 1000",
                      "BomVI", "BomVI, lambda = 3", "BomVI, lambda = 100", "BomVI, lambda = 1000"]
    folders = [path.parent for path in tmp_path.glob("run/*/checkpoint.pt")]
    weights = {folder.name: state_of(folder)["settings"]["past_weight"] for folder in folders}
    assert weights == {"bomla-0": 100.0, "bomla@1-0": 1.0, "bomla@3-0": 3.0, "bomla@1000-0": 1000.0,
                       "bomvi-0": 1.0, "bomvi@3-0": 3.0, "bomvi@100-0": 100.0, "bomvi@1000-0": 1000.0}


def test_omniglot_sequence_end_to_end(fake_data, tmp_path):
    """The task sequence runs with every method, evaluates after every task, and draws its figure."""
    args = "--filters 4 --iterations 1 --tasks 4 --shot 1 --query 2 --eval-tasks 2 --eval-every 2".split()
    work_here("omniglot", "--data", fake_data, "--out", tmp_path, *args)
    text = data_prep.report(tmp_path / "omniglot")
    assert "after task 4" in text and all(m.label in text for m in boml.METHODS.values())
    for method in boml.METHODS:
        rows = rows_of(tmp_path / f"omniglot/{method}-0/record.jsonl")
        ends = [r["stage"] for r in rows if r["iteration"] == r["iterations"]]
        assert ends == [1, 2, 3, 4] and {r["evaluated"] for r in rows} == {"unseen alphabets"}
    ElementTree.parse(tmp_path / "omniglot" / "accuracy.svg")


RAW = HERE.parent / "shared" / "raw"  # real archives, used where they are there


@pytest.mark.parametrize("program", ["boml.py", "data_prep.py"])
def test_interrupt_during_the_imports(program, tmp_path):
    """Ctrl-C while the programs still import ends them without a traceback."""
    (tmp_path / "numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    line = [sys.executable, HERE / program, "launch", "triathlon"]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("Unable to allocate 3 TiB"), RuntimeError(
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nException raised from")])
def test_short_memory_is_one_sentence(error, capsys):
    """Where memory runs out, the sentence says so and what to lower."""
    def fail():
        raise error

    with pytest.raises(SystemExit) as end:
        boml.one_sentence(fail)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert re.fullmatch(r"boml: not enough memory \(.+\); lower --meta-batch or --query\.\n", said)


def test_error_of_the_program_keeps_its_traceback():
    """An error that is no user's and no machine's is not made a sentence."""
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        boml.one_sentence(lambda: torch.ones(2) @ torch.ones(3))


# ------------------------------------------------------------------------------------------------- Preparation


def command(*args, program="data_prep.py"):
    line = [sys.executable, str(Path(boml.__file__).with_name(program)), *map(str, args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("args", [
    ["imagenet"], ["--colour"], ["--raw", "/nowhere"], ["launch", "triathlon", "--way", "1"]])
def test_problem_of_preparation_is_one_line_and_status_2(args):
    """The person sees one sentence and no traceback, and the exit status is 2."""
    code, text, errors = command(*args)
    assert code == 2 and errors.count("\n") == 1 and errors.startswith("boml: ") and not text


# --------------------------------------------------------------------------------------------------- Archives


def png(size=(105, 105), seed=0):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 2, size, dtype=np.uint8) * 255).save(file, "PNG")
    return file.getvalue()


def jpg(top, bottom=None, size=(40, 60)):
    """A picture of one colour, the lowest 20 rows of another."""
    file, image = io.BytesIO(), Image.new("RGB", size, top)
    image.paste(bottom or top, (0, size[1] - 20, *size))
    image.save(file, "JPEG", quality=95, subsampling=0)  # 8x8 blocks: the colours do not run into each other
    return file.getvalue()


def tar(path, contents):
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_omniglot(folder, characters=("Greek/character18", "Latin/character03", "Cyrillic/character01")):
    for part, some in (("background", characters[:2]), ("evaluation", characters[2:])):
        with zipfile.ZipFile(folder / f"images_{part}.zip", "w") as z:
            for character in some:
                for d in range(3):
                    z.writestr(f"images_{part}/{character}/{d}.png", png(seed=d))


def write_quickdraw(folder):
    for c in ("cat", "The Great Wall of China", "angel"):
        np.save(folder / f"{c}.npy", np.full((4, 784), 255, np.uint8))


def write_cifar(folder, rows=6):
    labels = np.stack([np.full(rows, 9), np.arange(rows) % 3], 1)  # coarse, fine
    pixels = np.zeros((rows, 3, 32, 32), np.uint8)
    pixels[:, 0], pixels[:, 2] = 200, 50 + labels[:, 1, None, None]  # red 200, green 0, blue 50 or a little more
    data = np.concatenate([labels, pixels.reshape(rows, -1)], 1).astype(np.uint8)
    files = {"train.bin": data.tobytes(), "test.bin": data[:3].tobytes(),
             "fine_label_names.txt": b"beaver\napple\nbaby\n"}
    tar(folder / "cifar-100-binary.tar.gz", {f"cifar-100-binary/{name}": file for name, file in files.items()})


def write_imagenet(folder):
    grey = io.BytesIO()
    Image.new("L", (84, 84), 100).save(grey, "JPEG")
    pictures = {"n00/a": jpg("red"), "n01855672/b": grey.getvalue(), "n01930112/c": jpg("blue")}
    tar(folder / "mini_imagenet.tar", {f"mini_imagenet/{name}.jpg": content for name, content in pictures.items()})


def write_flowers(folder, compress=False, labels=(2, 1, 2, 3)):
    element = lambda kind, data: np.array([kind, len(data)], "<u4").tobytes() + data + bytes(-len(data) % 8)
    parts = element(6, bytes(8)) + element(5, np.array([1, len(labels)], "<i4").tobytes()) + element(1, b"labels")
    matrix = element(14, parts + element(2, bytes(labels)))
    if compress:
        matrix = zlib.compress(matrix)
        matrix = np.array([15, len(matrix)], "<u4").tobytes() + matrix
    (folder / "imagelabels.mat").write_bytes(b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + matrix)
    colours = {1: "red", 2: "blue", 3: "lime"}
    pictures = {f"jpg/image_{i:05d}.jpg": jpg(colours.get(label, "red")) for i, label in enumerate(labels, 1)}
    tar(folder / "102flowers.tgz", pictures)


def write_aircraft(folder):
    base = "fgvc-aircraft-2013b/data"
    pictures = {f"{base}/images/000000{i}.jpg": jpg(c, "white") for i, c in enumerate(("red", "blue", "lime"), 1)}
    tar(folder / "fgvc-aircraft-2013b.tar.gz", pictures | {
        f"{base}/images_variant_trainval.txt": b"0000001 Boeing 717\n0000003 A310\n",
        f"{base}/images_variant_test.txt": b"0000002 A300B4\n"})


ARCHIVES = {  # how to write it, images, class of each image in the order of the packed file, split of each class
    "omniglot": (write_omniglot, "Cyrillic/character01 Greek/character18 Latin/character03", 3, "train val test"),
    "omniglot_alphabets": (write_omniglot, "Cyrillic/character01 Greek/character18 Latin/character03", 3,
                           "val test train"),
    "mini_quickdraw": (write_quickdraw, "The_Great_Wall_of_China angel cat", 4, "val test train"),
    "cifar_fs": (write_cifar, "apple baby beaver", 3, "train test val"),
    "mini_imagenet": (write_imagenet, "n00 n01855672 n01930112", 1, "train val test"),
    "vgg_flowers": (write_flowers, "001 002 002 003", 1, "train test val"),
    "aircraft": (write_aircraft, "A300B4 A310 Boeing_717", 1, "train val test"),
}


def packed_archive(name, folder, monkeypatch):
    """The arrays of a small archive in the official layout, packed and read again, by their names."""
    ARCHIVES[name][0](folder)
    monkeypatch.setitem(data_prep.COUNTS, name, (1, 1, 1))
    path = data_prep.make(name, folder, folder / "data")
    return dict(zip(("images", "labels", "classes", "split", "origin"), boml.read_npz(path)))


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_in_official_layout(name, tmp_path, monkeypatch):
    """A small archive in the official layout is packed to 28x28 bytes, sorted by class, without a pickle."""
    arrays = packed_archive(name, tmp_path, monkeypatch)
    _, order, each, _ = ARCHIVES[name]
    found = arrays["classes"][arrays["labels"]]
    assert found.tolist() == [c.replace("_", " ") if name in ("mini_quickdraw", "aircraft") else c
                              for c in order.split() for _ in range(each)]
    assert arrays["images"].dtype == np.uint8 and arrays["images"].shape[:3] == (len(found), 28, 28)


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_is_split(name, tmp_path, monkeypatch):
    """The packed file says for each class whether it is for training, validation or test."""
    assert packed_archive(name, tmp_path, monkeypatch)["split"].tolist() == ARCHIVES[name][3].split()


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_is_labelled_real(name, tmp_path, monkeypatch):
    """What is made from an archive in a folder is labelled as real and supplied."""
    assert packed_archive(name, tmp_path, monkeypatch)["origin"].tolist() == ["real", "supplied"]


def colours_of(images):
    """The strongest channel in the lowest row of each."""
    return [("red", "green", "blue")[int(image[-1, 14].argmax())] for image in images]


def test_strokes_of_omniglot_are_dark(tmp_path, monkeypatch):
    """Omniglot's drawings keep their shades, dark strokes on white."""
    expected = np.asarray(Image.open(io.BytesIO(png(seed=0))).resize((28, 28), Image.Resampling.BILINEAR))
    assert np.array_equal(packed_archive("omniglot", tmp_path, monkeypatch)["images"][0], expected)


def test_strokes_of_quickdraw_are_turned_dark(tmp_path, monkeypatch):
    """QuickDraw's bright strokes on black become dark ones on white."""
    assert (packed_archive("mini_quickdraw", tmp_path, monkeypatch)["images"] == 0).all()


def test_channels_of_cifar(tmp_path, monkeypatch):
    """CIFAR's planes of red, green and blue become pixels, under their fine label."""
    arrays = packed_archive("cifar_fs", tmp_path, monkeypatch)
    for image, label in zip(arrays["images"], arrays["labels"]):
        blue = {"beaver": 50, "apple": 51, "baby": 52}[arrays["classes"][label]]
        assert (image == [200, 0, blue]).all()


def test_grey_image_of_imagenet(tmp_path, monkeypatch):
    """miniImageNet's grey image becomes one of three equal channels."""
    image = packed_archive("mini_imagenet", tmp_path, monkeypatch)["images"][1]
    assert image.shape == (28, 28, 3) and abs(image.astype(int) - 100).max() < 5


def test_labels_of_flowers(tmp_path, monkeypatch):
    """Each flower is of the class that the MATLAB file has at its number."""
    images = packed_archive("vgg_flowers", tmp_path, monkeypatch)["images"]
    assert colours_of(images) == ["red", "blue", "blue", "green"]


def test_banner_of_aircraft(tmp_path, monkeypatch):
    """The 20 rows of an aircraft's banner are cut off, and nothing else."""
    images = packed_archive("aircraft", tmp_path, monkeypatch)["images"]
    assert colours_of(images) == ["blue", "green", "red"] and images.min((1, 2, 3)).max() < 30
    assert abs(images.astype(int) - images[:, :1, :1]).max() < 12  # no trace of the white


def test_compressed_and_plain_matlab_files(tmp_path):
    """A MATLAB v5 file reads the same whether its matrix is compressed, as the official one, or not."""
    for compress in (False, True):
        write_flowers(tmp_path, compress, labels=(7, 102, 1, 3, 5))
        assert data_prep.read_mat(tmp_path / "imagelabels.mat")["labels"].tolist() == [7, 102, 1, 3, 5]


def test_mini_imagenet_as_a_folder(tmp_path):
    """miniImageNet may also come as a folder of folders."""
    for wnid in ("n01", "n02"):
        (tmp_path / "mini_imagenet" / wnid).mkdir(parents=True)
        (tmp_path / "mini_imagenet" / wnid / "a.jpg").write_bytes(jpg("red"))
    assert [name for name, _ in data_prep.mini_imagenet(tmp_path, None)] == ["n01", "n02"]


def test_archive_that_is_not_official_is_named(tmp_path, capsys):
    """An archive whose checksum is not the official one is used, and named on the screen."""
    write_cifar(tmp_path)
    assert data_prep.obtain("cifar_fs", tmp_path, None) == [tmp_path / "cifar-100-binary.tar.gz"]
    assert f"{tmp_path}/cifar-100-binary.tar.gz is not the official file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_with_too_few_classes(name, tmp_path):
    """An archive with the wrong number of classes ends in a sentence and no file."""
    ARCHIVES[name][0](tmp_path)
    with pytest.raises(boml.Problem, match="holds 3 classes, not"):
        data_prep.make(name, tmp_path, tmp_path / "data")
    assert not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_with_other_classes(name, tmp_path, monkeypatch):
    """An archive whose class names do not split as the official ones do ends in a sentence and no file."""
    ARCHIVES[name][0](tmp_path)
    monkeypatch.setitem(data_prep.COUNTS, name, (2, 1, 0))
    with pytest.raises(boml.Problem, match="class names are not the official ones"):
        data_prep.make(name, tmp_path, tmp_path / "data")
    assert not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("name", ARCHIVES)
def test_damaged_archive(name, tmp_path, monkeypatch):
    """An archive that is cut off ends in a sentence and no file."""
    ARCHIVES[name][0](tmp_path)
    monkeypatch.setitem(data_prep.COUNTS, name, (1, 1, 1))
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 8])
    with pytest.raises(boml.Problem, match="damaged|cut off|not a readable image"):
        data_prep.make(name, tmp_path, tmp_path / "data")
    assert not list(tmp_path.glob("data/*"))


def test_archive_on_a_full_disk(tmp_path, monkeypatch):
    """An error of the machine, not of the bytes, is not called a damaged archive."""
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(data_prep.UNPACK, "cifar_fs", full)
    with pytest.raises(OSError, match="No space left on device"):
        data_prep.make("cifar_fs", None, tmp_path)


def test_dataset_that_is_there_is_kept(fake_data, tmp_path, capsys):
    """A dataset that is there and whose archive is not is said to be kept, and is."""
    shutil.copy(fake_data / "cifar_fs.npz", tmp_path)
    before = (tmp_path / "cifar_fs.npz").read_bytes()
    data_prep.main(["cifar_fs", "--raw", str(tmp_path), "--data", str(tmp_path)])
    assert f"kept: cifar-100-binary.tar.gz is not in {tmp_path}" in capsys.readouterr().out
    assert (tmp_path / "cifar_fs.npz").read_bytes() == before


def test_missing_archive_is_named(tmp_path, capsys):
    """An archive that is not in the folder is named in the table, and nothing is downloaded for it; if its dataset was
    asked for by name, that is an error."""
    line = ["--raw", str(tmp_path), "--data", str(tmp_path / "data")]
    with pytest.raises(boml.Problem, match="^cifar_fs: missing, for the reason above.$"):
        data_prep.main(["cifar_fs", *line])
    data_prep.main(line)
    assert f"missing: cifar-100-binary.tar.gz is not in {tmp_path}" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


# ------------------------------------------------------------------------------------------- Hostile archives


def zip_of(name="images_background/A/c01/1.png", content=None, **changes):
    """A writer of images_background.zip with one member, changed."""
    def write(folder):
        write_omniglot(folder)
        with zipfile.ZipFile(folder / "images_background.zip", "w", zipfile.ZIP_DEFLATED) as z:
            info = zipfile.ZipInfo(name)
            info.filename = name  # as it is, also with backslashes
            for key, value in changes.items():
                setattr(info, key, value)
            z.writestr(info, png() if content is None else content)
    return write


def tar_of(name="cifar-100-binary/train.bin", content=b"", **changes):
    """A writer of cifar-100-binary.tar.gz with one member, changed; a size of its own is declared but not there."""
    def write(folder):
        file, info = io.BytesIO(), tarfile.TarInfo(name)
        info.size = len(content)
        for key, value in changes.items():
            setattr(info, key, value)
        file.write(info.tobuf() + content + bytes(-len(content) % 512 + 1024))
        (folder / "cifar-100-binary.tar.gz").write_bytes(gzip.compress(file.getvalue()))
    return write


def npy_of(shape, dtype="|u1", data=b"", fortran=False):
    header = str(dict(descr=dtype, fortran_order=fortran, shape=shape)).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def drawings_of(content):
    return lambda folder: (folder / "cat.npy").write_bytes(content)


def labels_of(content):
    def write(folder):
        write_flowers(folder)
        (folder / "imagelabels.mat").write_bytes(bytes(128) + content)
    return write


def file_of(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def no_zip(folder):
    for part in ("background", "evaluation"):
        (folder / f"images_{part}.zip").write_bytes(b"hello")


def bomb(size):
    """An image of one bit per pixel, far larger than its file."""
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    return file.getvalue()


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


MAGIC = b"\x93NUMPY\x01\x00"
CODE = b"__import__('os').system('touch owned')"
MATLAB_BOMB = struct.pack("<II", 15, 10**6) + zlib.compress(bytes(600 << 20), 1)
HOSTILE_ARCHIVES = {  # dataset, how to write its archive, a word of the answer
    "zip: not one": ("omniglot", no_zip, "damaged"),
    "zip: path upwards": ("omniglot", zip_of("images_background/../../evil.png"), "outside of it"),
    "zip: absolute path": ("omniglot", zip_of("/etc/evil.png"), "outside of it"),
    "zip: backslashes upwards": ("omniglot", zip_of("a\\..\\..\\evil.png"), "outside of it"),
    "zip: drive": ("omniglot", zip_of("C:/evil.png"), "outside of it"),
    "zip: link": ("omniglot", zip_of(external_attr=0o120777 << 16), "a link"),
    "zip: bomb": ("omniglot", zip_of(content=bytes(300 << 20), compress_type=zipfile.ZIP_DEFLATED), "bytes long"),
    "zip: path too short": ("omniglot", zip_of("evil.png"), "damaged"),
    "zip: no image": ("omniglot", zip_of(content=b"\x89PNG\r\n\x1a\nnot really"), "not a readable image"),
    "zip: empty image": ("omniglot", zip_of(content=b""), "not a readable image"),
    "zip: image bomb": ("omniglot", zip_of(content=bomb((20000, 20000))), "67 million pixels"),
    "zip: wide image bomb": ("omniglot", zip_of(content=bomb((1 << 27, 1))), "67 million pixels"),
    "tar: not one": ("cifar_fs", file_of("cifar-100-binary.tar.gz", b"hello"), "damaged"),
    "tar: empty": ("cifar_fs", file_of("cifar-100-binary.tar.gz", b""), "damaged"),
    "tar: path upwards": ("cifar_fs", tar_of("cifar-100-binary/../../evil"), "outside of it"),
    "tar: absolute path": ("cifar_fs", tar_of("/etc/evil"), "outside of it"),
    "tar: symbolic link": ("cifar_fs", tar_of(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link"),
    "tar: hard link": ("cifar_fs", tar_of(type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a link"),
    "tar: device": ("cifar_fs", tar_of(type=tarfile.CHRTYPE), "a link"),
    "tar: a petabyte": ("cifar_fs", tar_of(size=1 << 50), "bytes long"),
    "tar: more declared than there": ("cifar_fs", tar_of(size=100 << 20), "damaged"),
    "tar: files missing": ("cifar_fs", tar_of(), "damaged"),
    "npy: garbage": ("mini_quickdraw", drawings_of(MAGIC + b"\xff\xff{'descr'"), "damaged"),
    "npy: header cut in a bracket": ("mini_quickdraw", drawings_of(MAGIC + b"\x10\x00{'shape': (1, (2 "), "damaged"),
    "npy: shape of booleans": ("mini_quickdraw", drawings_of(npy_of((True, 784))), "cut off"),
    "npy: version": ("mini_quickdraw", drawings_of(b"\x93NUMPY\x09\x00" + bytes(100)), "damaged"),
    "npy: code in header": ("mini_quickdraw", drawings_of(MAGIC + struct.pack("<H", len(CODE)) + CODE), "damaged"),
    "npy: pickle": ("mini_quickdraw", drawings_of(npy_of((1, 784), "|O", pickle.dumps(Evil()))), "not drawings"),
    "npy: exabytes": ("mini_quickdraw", drawings_of(npy_of((1 << 60, 784))), "cut off"),
    "npy: negative": ("mini_quickdraw", drawings_of(npy_of((-5, 784))), "damaged"),
    "npy: other shape": ("mini_quickdraw", drawings_of(npy_of((5, 28, 28), data=bytes(5 * 784))), "not drawings"),
    "npy: cut off": ("mini_quickdraw", drawings_of(npy_of((5, 784), data=bytes(784))), "cut off"),
    "mat: empty": ("vgg_flowers", labels_of(b""), "damaged"),
    "mat: bomb": ("vgg_flowers", labels_of(MATLAB_BOMB), "damaged"),
    "mat: not compressed": ("vgg_flowers", labels_of(struct.pack("<II", 15, 8) + b"garbage!"), "damaged"),
    "mat: sizes without sense": ("vgg_flowers", labels_of(struct.pack("<II", 14, 1 << 31) + bytes(64)), "damaged"),
}


@pytest.mark.parametrize("case", HOSTILE_ARCHIVES)
def test_hostile_archive(case, tmp_path, monkeypatch):
    """It ends in one sentence that says why, with all files as they were, and within a gigabyte of memory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    name, write, word = HOSTILE_ARCHIVES[case]
    write(tmp_path / "raw")
    before = sorted(tmp_path.rglob("*"))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        with pytest.raises(boml.Problem, match=word) as problem:
            data_prep.main([name, "--raw", "raw", "--data", "data"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "\n" not in str(problem.value) and ("raw/" in str(problem.value) or name in str(problem.value))
    assert sorted(tmp_path.rglob("*")) == before


def packed(**changes):
    """A packed dataset of three classes, changed; None leaves an array out."""
    arrays = dict(images=np.zeros((6, 28, 28), np.uint8), labels=np.repeat([0, 1, 2], 2), split=np.array(boml.SPLITS),
                  classes=np.array(["a", "b", "c"]), origin=np.array(["real", "supplied"])) | changes
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as z:
        for name, array in arrays.items():
            if array is not None:
                content = io.BytesIO()
                if not isinstance(array, bytes):
                    np.lib.format.write_array(content, array)
                z.writestr(f"{name}.npy", array if isinstance(array, bytes) else content.getvalue())
    return file.getvalue()


EVIL = np.array([Evil()] * 3, dtype=object)
PACKED = {
    "nothing": b"",
    "text": b"hello",
    "cut off": packed()[:-30],
    "one array": npy_of((3,), data=b"abc"),
    "no images": packed(images=None),
    "no split": packed(split=None),
    "images: a petabyte": packed(images=npy_of((1 << 40, 28, 28))),
    "images: floats": packed(images=np.zeros((6, 28, 28))),
    "images: 27 rows": packed(images=np.zeros((6, 27, 28), np.uint8)),
    "images: 4 channels": packed(images=np.zeros((6, 28, 28, 4), np.uint8)),
    "images: cut off": packed(images=npy_of((6, 28, 28), data=b"short")),
    "images: header cut off": packed(images=MAGIC + b"\x10\x00{'descr': ('|u1'"),
    "labels: beyond the classes": packed(labels=np.array([0, 0, 1, 1, 2, 9])),
    "labels: negative": packed(labels=np.array([0, 0, 1, 1, -1, 2])),
    "labels: one class empty": packed(labels=np.array([0, 0, 0, 2, 2, 2])),
    "labels: too few": packed(labels=np.arange(5)),
    "labels: fewer, of all classes": packed(labels=np.array([0, 1, 2, 2, 2])),
    "labels: all zero, floats": packed(labels=np.zeros(6)),
    "classes: code": packed(classes=EVIL),
    "classes: pickle": packed(classes=npy_of((3,), "|O", pickle.dumps([Evil()] * 3))),
    "classes: too few": packed(classes=np.array(["a", "b"])),
    "classes: twice the same": packed(classes=np.array(["a", "a", "b"])),
    "classes: one word": packed(classes=np.array("abc")),
    "split: code": packed(split=EVIL),
    "split: other words": packed(split=np.array(["train", "val", "exam"])),
    "split: too few": packed(split=np.array(["train", "test"])),
    "split: too many": packed(split=np.array(["train", "val", "test", "test"])),
    "split: a matrix": packed(split=np.array([boml.SPLITS] * 3)),
    "origin: code": packed(origin=EVIL),
    "labels: floats": packed(labels=np.repeat([0.0, 1.0, 2.0], 2)),
    "labels: a column": packed(labels=np.repeat([0, 1, 2], 2)[:, None]),
    "classes: twice the same, split shorter": packed(classes=np.array(["a", "a", "b"]),
                                                     split=np.array(["train", "test"])),
    "origin: one word": packed(origin=np.array("real")),
    "origin: nothing": packed(origin=np.array([], "U4")),
    "no classes at all": packed(images=np.zeros((0, 28, 28), np.uint8), labels=np.zeros(0, int),
                                classes=np.array([], "U1"), split=np.array([], "U5")),
}


@pytest.mark.parametrize("case", PACKED)
def test_hostile_packed_file(case, tmp_path, monkeypatch):
    """A packed file that is not what it should be is refused in one sentence that names it, and runs no code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar_fs.npz").write_bytes(PACKED[case])
    sentence = "cifar_fs.npz is damaged .*; delete it and make it with: bash run.sh data cifar_fs"
    with pytest.raises(boml.Problem, match=sentence) as problem:
        boml.read_npz(tmp_path / "cifar_fs.npz")
    assert "\n" not in str(problem.value) and not (tmp_path / "owned").exists()


def test_sound_packed_file(tmp_path):
    """The file that the hostile ones are made from is accepted as it is."""
    (tmp_path / "cifar_fs.npz").write_bytes(packed())
    assert len(boml.read_npz(tmp_path / "cifar_fs.npz")) == 5


@pytest.mark.parametrize("labels", [np.array([2, 2, 1, 1, 0, 0]), np.array([0, 1, 2, 0, 1, 0], np.uint8)])
def test_packed_file_need_not_be_sorted(labels, tmp_path):
    """Whatever the order of the images in a packed file, each class has its own."""
    images = np.arange(6, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
    (tmp_path / "cifar_fs.npz").write_bytes(packed(images=images, labels=labels))
    data = load("cifar_fs", tmp_path)
    for c, rows in enumerate(data.rows):
        assert data.images[rows[rows >= 0], 0, 0, 0].tolist() == np.flatnonzero(labels == c).tolist()


# ------------------------------------------------------------------------ Hostile checkpoints and command lines


def unstarted_run(out):
    facts = dict(experiment="run", schedule="cpu", data="real", way=5, settings="", revision="", start_from="")
    job = boml.Job("maml", "maml", 0, toy_config(channels=1))
    return boml.Run(job, [toy_data()], [toy_data()], facts, out, lambda share: False)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


CHECKPOINTS = {"nothing": b"", "text": b"hello", "pickle": pickle.dumps(Evil()),
               "bare state": pickle.dumps({"theta": 1}), "code": saved(Evil()),
               "code in a state": saved({"theta": Evil()})}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_hostile_checkpoint(case, tmp_path, monkeypatch, capsys):
    """A checkpoint that is none is not believed, runs no code, and the sentence names the ways out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(CHECKPOINTS[case])
    with pytest.raises(boml.Problem, match="no readable checkpoint; use another --out, or --fresh"):
        unstarted_run(tmp_path).resume()
    assert "checkpoint.pt is damaged" in capsys.readouterr().err and not (tmp_path / "owned").exists()


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_hostile_checkpoint_and_a_fresh_start(case, tmp_path, monkeypatch):
    """With --fresh a checkpoint that is none is deleted unread, and the run starts over."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(CHECKPOINTS[case])
    run = unstarted_run(tmp_path)
    run.resume(fresh=True)
    assert (run.stage, run.iteration) == (0, 0) and not list(tmp_path.iterdir())


@settings(max_examples=60)
@given(st.sampled_from(["methods", "seeds", "sequence", "schedule", "device", "data", *boml.PER_DATASET] + [
    f.name for f in dataclasses.fields(boml.Config) if f.type is not bool]), st.text(max_size=12))
def test_any_text_as_an_option(option, text):
    """Whatever stands after an option, the answer is a configuration or one sentence."""
    try:
        runs_of("triathlon", f"--{option.replace('_', '-')}={text}")
    except boml.Problem as problem:
        assert str(problem).strip()


# ---------------------------------------------------------------------------------------------- Real archives


@pytest.mark.skipif(not RAW.is_dir(), reason="the real archives are not here")
@pytest.mark.parametrize("name, images, classes", [
    ("omniglot", 32460, (1100, 100, 423)), ("omniglot_alphabets", 32460, (1195, 206, 222)),
    ("mini_quickdraw", 34500, (241, 52, 52)), ("cifar_fs", 60000, (64, 16, 20)),
    ("mini_imagenet", 6000, (64, 16, 20)), ("vgg_flowers", 8189, (66, 16, 20)), ("aircraft", 1000, (64, 16, 20))])
def test_real_archive(name, images, classes, tmp_path):
    """The real archives pack to their known counts, and load with the paper's split."""
    data_prep.make(name, RAW, tmp_path)
    data = load(name, tmp_path)
    turns = 4 if name == "omniglot" else 1
    assert data.kind == "real" and len(data.images) == turns * images
    assert tuple(len(data.splits[s]) for s in boml.SPLITS) == tuple(turns * n for n in classes)


# -------------------------------------------------------------------------------------------------- Downloads


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges, or one of FILES; /cut breaks off after 1000 bytes, /plain ignores ranges, /gone is
    not there."""

    CONTENT = np.random.default_rng(0).bytes(5000)
    FILES = {}

    def do_GET(self):
        if self.path == "/gone":
            return self.send_error(404)
        content = self.FILES.get(self.path, self.CONTENT)
        begin, end = 0, len(content)
        if (wanted := self.headers.get("Range")) and self.path != "/plain":
            begin, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
            begin, end = int(begin), min(int(last) + 1, end) if last else end
            if begin >= end:
                return self.send_error(416)
        self.send_response(206 if wanted and self.path != "/plain" else 200)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.write(content[begin : min(end, begin + 1000) if self.path == "/cut" else end])

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path, before", [("whole", 0), ("cut", 0), ("whole", 1234), ("plain", 1234), ("whole", 5000)])
def test_download_is_whole(path, before, server, tmp_path):
    """Whether cut, resumed from a part, or served without ranges, the file arrives whole and is checked."""
    (tmp_path / "f.part").write_bytes(Server.CONTENT[:before])
    md5 = hashlib.md5(Server.CONTENT).hexdigest()
    assert data_prep.download(f"{server}/{path}", tmp_path / "f", md5).read_bytes() == Server.CONTENT
    assert not (tmp_path / "f.part").exists()


@pytest.mark.parametrize("path", ["whole", "cut", "plain"])
def test_download_of_a_beginning(path, server, tmp_path):
    """With a size, just that many first bytes are fetched, also where the connection is cut."""
    assert data_prep.download(f"{server}/{path}", tmp_path / "f", size=2500).read_bytes() == Server.CONTENT[:2500]


@pytest.mark.parametrize("how, word", [
    (dict(md5="0" * 32), "has md5"),
    (dict(check=lambda data: data[:6] == b"\x93NUMPY"), "does not hold what it should")])
def test_wrong_content_is_refused(how, word, server, tmp_path):
    """A download whose checksum or content is wrong is deleted and reported."""
    with pytest.raises(boml.Problem, match=word):
        data_prep.download(f"{server}/whole", tmp_path / "f", **how)
    assert not list(tmp_path.iterdir())


def test_server_without_the_file(server, tmp_path):
    """An error of the server leaves the dataset out and nothing behind."""
    with pytest.raises(data_prep.Unreachable, match="404"):
        data_prep.download(f"{server}/gone", tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_no_server(tmp_path):
    """Without a server the dataset is left out and nothing stays behind."""
    with pytest.raises(data_prep.Unreachable, match="cannot be reached"):
        data_prep.download("http://127.0.0.1:9/f", tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_quickdraw_is_fetched_in_part(server, tmp_path, monkeypatch):
    """Of each QuickDraw class only the header and the first drawings are downloaded, whatever is in its name."""
    names = [f"class {c}" for c in range(345)]
    drawings = np.random.default_rng(0).integers(0, 256, (9, 784), dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, drawings)
    monkeypatch.setattr(Server, "FILES", {"/categories.txt": "\n".join(names).encode()} | {
        f"/{name.replace(' ', '%20')}.npy": file.getvalue() for name in names})
    monkeypatch.setitem(data_prep.SOURCES, "mini_quickdraw", [(f"{server}/categories.txt", None), (f"{server}/", None)])
    monkeypatch.setattr(data_prep, "DRAWINGS", 2)
    found = list(data_prep.mini_quickdraw(None, tmp_path))
    assert [name for name, _ in found] == [name for name in names for _ in range(2)]
    assert all(np.array_equal(255 - drawing.ravel(), drawings[i % 2]) for i, (_, drawing) in enumerate(found))
    assert {path.stat().st_size for path in tmp_path.rglob("*.npy")} == {128 + 2 * 784}


# -------------------------------------------------------------------------------------------------- Stand-ins


def cut_off(patch):
    """No dataset can be downloaded any more; generated ones are drawn with few images per class, to save time."""
    patch.setattr(data_prep, "TIMEOUT", 1)
    for name, sources in data_prep.SOURCES.items():
        patch.setitem(data_prep.SOURCES, name, [(f"http://127.0.0.1:9/{url[8:]}", md5) for url, md5 in sources])
    for name, draw in data_prep.DRAW.items():
        patch.setitem(data_prep.DRAW, name, functools.partial(draw, each=6))


def npz_in(folder):
    return sorted(path.stem for path in folder.glob("*.npz"))


def prepare_for(*argv):
    """The names of the datasets that run.sh gives to the runs of a command line, once it has prepared them."""
    with tempfile.TemporaryDirectory() as folder:
        line = ["--method=maml", f"--out={folder}", *map(str, argv)]  # not the runs of this checkout
        (args, _), = data_prep.prepare_runs([line], Path(folder))
    return [name for name, _ in args.sequence]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder with what run.sh makes for the triathlon where nothing can be downloaded."""
    folder = tmp_path_factory.mktemp("stand_ins") / "data"
    with pytest.MonkeyPatch.context() as patch:
        cut_off(patch)
        prepare_for("triathlon", "--data", folder)
    return folder


TRIATHLON = ["generated_characters", "generated_doodles", "generated_textures"]


def test_stand_ins_are_drawn(stand_ins):
    """Where no dataset of the sequence can be downloaded, the stand-in of each is made, and no other."""
    assert npz_in(stand_ins) == TRIATHLON


def test_stand_ins_are_labelled_generated(stand_ins):
    """A generated dataset says of itself that it is generated."""
    assert [boml.read_npz(stand_ins / f"{name}.npz")[4].tolist() for name in TRIATHLON] == [["generated", "drawn"]] * 3


def test_stand_ins_are_split(stand_ins):
    """A generated dataset has its classes for training first, then those for validation and for test."""
    for name in TRIATHLON:
        assert boml.read_npz(stand_ins / f"{name}.npz")[3].tolist() == [
            s for s, n in zip(boml.SPLITS, data_prep.COUNTS[name]) for _ in range(n)]


def test_stand_ins_are_as_drawn(stand_ins):
    """The images of a generated dataset are stored class by class as they were drawn from seed 0."""
    images, labels, *_ = boml.read_npz(stand_ins / "generated_doodles.npz")
    drawn, classes = zip(*data_prep.draw_doodles(np.random.default_rng(0), 300, 6))
    assert np.array_equal(images, drawn) and labels.tolist() == list(classes)


def test_stand_ins_are_taken(stand_ins, monkeypatch):
    """Where no dataset can be had, run.sh gives the stand-ins to the runs, under their own names."""
    cut_off(monkeypatch)
    assert prepare_for("triathlon", "--data", stand_ins) == TRIATHLON


def test_stand_ins_are_not_taken_unasked(stand_ins):
    """boml.py alone takes no stand-in, though it is there: a missing dataset is an error."""
    with pytest.raises(boml.Problem, match="omniglot.npz is not there"):
        boml.load_sequence(boml.parse(["triathlon", "--data", str(stand_ins), "--out", str(stand_ins)]))


def test_mistyped_folder_names_the_way_out(tmp_path):
    """A mistyped --data is an error of boml.py that names the file and how to make it."""
    with pytest.raises(boml.Problem) as problem:
        boml.main(["triathlon", "--data", str(tmp_path / "daat"), "--out", str(tmp_path)])
    for part in (f"{tmp_path / 'daat'}/omniglot.npz", "bash run.sh data omniglot"):
        assert part in str(problem.value)
    assert "\n" not in str(problem.value) and not (tmp_path / "daat").exists()


def test_what_is_there_is_not_made_again(stand_ins, tmp_path, monkeypatch, capsys):
    """A second preparation leaves the files as they are and says that they are ready."""
    shutil.copytree(stand_ins, tmp_path / "data")
    cut_off(monkeypatch)
    state = lambda: [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*.npz"))]
    before = state()
    prepare_for("triathlon", "--data", tmp_path / "data")
    assert before == state()
    assert re.findall(r"(generated_\w+) .* ready", capsys.readouterr().out) == TRIATHLON


def serve_cifar(server, folder, patch):
    """Let CIFAR be downloaded, a small one; and nothing else."""
    cut_off(patch)
    write_cifar(folder)
    content = (folder / "cifar-100-binary.tar.gz").read_bytes()
    patch.setattr(Server, "FILES", {"/cifar-100-binary.tar.gz": content})
    source = f"{server}/cifar-100-binary.tar.gz", hashlib.md5(content).hexdigest()
    patch.setitem(data_prep.SOURCES, "cifar_fs", [source])
    patch.setitem(data_prep.COUNTS, "cifar_fs", (1, 1, 1))


def test_what_can_be_downloaded_is_real(server, tmp_path, monkeypatch):
    """Of a sequence each dataset that can be downloaded is made from its archive, and only the others are drawn."""
    serve_cifar(server, tmp_path, monkeypatch)
    prepare_for("run", "--sequence", "cifar_fs,aircraft", "--data", tmp_path)
    assert npz_in(tmp_path) == ["cifar_fs", "generated_aeroplanes"]
    assert boml.read_npz(tmp_path / "cifar_fs.npz")[4].tolist() == ["real", "downloaded"]


def test_real_dataset_goes_before_its_stand_in(server, tmp_path, monkeypatch):
    """A dataset that is there is taken itself, even beside its stand-in."""
    serve_cifar(server, tmp_path, monkeypatch)
    names = prepare_for("run", "--sequence", "cifar_fs,generated_textures", "--data", tmp_path)
    assert names == ["cifar_fs", "generated_textures"]


def test_learned_dataset_needs_no_stand_in(fake_data, tmp_path, monkeypatch):
    """A dataset that the run has learned and that is gone keeps its name: nothing stands in for it."""
    cut_off(monkeypatch)
    shutil.copytree(fake_data, tmp_path / "data")
    line = ["run", "--data", tmp_path / "data", *SMALL, "--out", tmp_path]
    work_here(*line, "--sequence", "omniglot", "--methods", "maml")
    (tmp_path / "data/omniglot.npz").unlink()
    assert prepare_for(*line, "--sequence", "omniglot,mini_quickdraw") == ["omniglot", "mini_quickdraw"]


@pytest.mark.parametrize("had", [True, False])
def test_dataset_that_one_run_lacks(had, fake_data, tmp_path, monkeypatch):
    """A dataset that only some of the runs have learned is prepared for the others; if it cannot be had, they are
    refused before any run starts."""
    shutil.copytree(fake_data, tmp_path / "data")
    line = ["run", "--data", tmp_path / "data", *SMALL, "--out", tmp_path]
    work_here(*line, "--sequence", "omniglot", "--methods", "maml")
    (tmp_path / "data/omniglot.npz").unlink()
    asked = []
    monkeypatch.setattr(data_prep, "prepare", lambda name, *_: asked.append(name) or had)
    lines = [[f"--method={method}", *map(str, line), "--sequence=omniglot"] for method in ("maml", "bomvi")]
    refused = pytest.raises(boml.Problem, match="^omniglot cannot be had.*; leave out bomvi-0.$")
    with contextlib.nullcontext() if had else refused:
        names = [args.sequence[0][0] for args, _ in data_prep.prepare_runs(lines, tmp_path)]
        assert names == ["omniglot", "omniglot"]
    assert asked == ["omniglot"]


def test_stand_in_that_is_learned_stays(stand_ins, tmp_path, monkeypatch):
    """A run that has learned a stand-in goes on with it, though the dataset can be had by now."""
    line = ["run", "--sequence", "omniglot", "--data", stand_ins, *SMALL, "--iterations", 1, "--out", tmp_path]
    with monkeypatch.context() as patch:
        cut_off(patch)
        work_here(*line, "--methods", "maml")
    monkeypatch.setattr(data_prep, "prepare", lambda *_: True)
    assert prepare_for(*line) == ["generated_characters"]


@pytest.mark.parametrize("sequence", [["run", "--sequence", "omniglot"], ["omniglot", "--tasks", 1, "--shot", 1]])
def test_stand_in_that_is_begun_stays(sequence, tmp_path, monkeypatch):
    """A run stopped before it has learned a stand-in goes on with it, as N-athlon or as task sequence."""
    cut_off(monkeypatch)
    line = [*sequence, "--data", tmp_path, *SMALL, "--iterations", 2, "--out", tmp_path]
    name, = prepare_for(*line)
    stopped, = runs_of(*line, "--methods", "maml", "--sequence", name)
    assert not boml.work(stopped, lambda share: True)
    monkeypatch.setattr(data_prep, "prepare", lambda *_: True)
    assert name in data_prep.DRAW and prepare_for(*line) == [name]


def test_runs_are_told_device_and_schedule(fake_data, monkeypatch):
    """Each run is told the device and the schedule that were announced, whatever GPU it sees."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = [["--method=maml", "run", "--sequence=omniglot", "--data", str(fake_data)]]
    (_, line), = data_prep.prepare_runs(lines, None)
    assert line[-2:] == ["--device=cuda", "--schedule=paper"]


@pytest.mark.parametrize("visible, expected", [(None, "0101"), ("3,5", "3535")])
def test_runs_are_spread_over_the_gpus(visible, expected, monkeypatch):
    """More runs than GPUs share those that are there, of which the environment may name some."""
    seen = []

    class Ended:
        returncode = 0

        def __init__(self, line, stdout, env):
            seen.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self):
            return 0

    monkeypatch.setattr(data_prep, "subprocess", SimpleNamespace(Popen=Ended, DEVNULL=None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = SimpleNamespace(device="cuda", job=SimpleNamespace(name="maml-0"))
    data_prep.side_by_side([(run, [])] * 4, 4, lambda: None)
    assert "".join(seen) == expected


def test_own_folder_named_like_a_dataset_is_ones_own():
    """A packed file is learned as a dataset of one's own, whatever its name."""
    args = boml.parse(["run", "--sequence", "elsewhere/omniglot.npz", "--schedule", "paper", "--device", "cpu"])
    assert args.sequence[0][1] == boml.OWN


@pytest.mark.parametrize("method", ["maml", "toe", "ftml"])
def test_lambda_is_for_methods_with_a_posterior(method):
    """boml.py refuses a lambda to a method that has no use for it."""
    with pytest.raises(boml.Problem, match=f"--past-weight is not for {method}, which has no posterior"):
        boml.parse(["triathlon", "--method", method, "--past-weight", "7"])


def test_own_folder_is_copied_for_its_runs_only(tmp_path, forks):
    """A folder of one's own is packed for the time of the runs; afterwards no copy of its images is left."""
    own_folder(tmp_path / "mine", 12)
    before = set(Path(tempfile.gettempdir()).glob("boml-*"))
    launch("run", "--sequence", tmp_path / "mine", "--methods", "maml", *SMALL, "--out", tmp_path / "out")
    assert (tmp_path / "out/run/maml-0/record.jsonl").read_text()
    assert set(Path(tempfile.gettempdir()).glob("boml-*")) == before and not list(tmp_path.rglob("*.npz"))


@pytest.mark.parametrize("name", sorted({name for e in boml.EXPERIMENTS.values() for name in e.sequence}))
def test_every_dataset_has_a_stand_in(name):
    """For each dataset of an experiment there is one that can be drawn, learned with the same alpha and k."""
    one, other = boml.DATASETS[name], boml.DATASETS[boml.DATASETS[name].stand_in]
    assert one.stand_in in data_prep.DRAW and one.stand_in in data_prep.COUNTS
    assert (one.inner_rate, one.inner_steps, one.eval_steps) == (other.inner_rate, other.inner_steps, other.eval_steps)


# ----------------------------------------------------------------------------------------------- Approximation
# How near is the curvature that BomLA carries to the exact adapted Fisher of Eq. 11? On networks small enough to
# know. bash run.sh approximation prints the table.

FORMS = {  # name: averaging, jacobian rate (None: alpha)
    "no Jacobian": ("averages", 0.0),
    "averages, rate alpha": ("averages", None),
    "averages, rate 1": ("averages", 1.0),
    "products, rate alpha": ("products", None),
    "products, rate 1": ("products", 1.0),
}


def tiny_problem(seed, iterations, alpha, sizes=(4, 5, 5, 3), tasks=8):
    """A tanh network, meta-trained for some iterations on random 3-way tasks, and a batch of tasks; float64."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.double)

    def batch(way=sizes[-1], query=5):  # each class a point and noise around it
        x = normal(tasks, way, 1, sizes[0]) + 0.5 * normal(tasks, way, 1 + query, sizes[0])
        y = torch.arange(way)[:, None].expand(tasks, way, 1 + query)
        return tuple(part[:, :, s].flatten(1, 2) for s in (slice(0, 1), slice(1, None)) for part in (x, y))

    theta = {}
    for l, (i, o) in enumerate(zip(sizes, sizes[1:])):
        theta |= {f"linear{l}.weight": normal(o, i) / math.sqrt(i), f"linear{l}.bias": 0.1 * normal(o)}
    theta = {n: v.requires_grad_() for n, v in theta.items()}
    optimiser = torch.optim.Adam(theta.values(), 0.01)
    for _ in range(iterations):
        rate = torch.tensor([alpha], dtype=torch.double)
        for p, g in zip(theta.values(), boml.meta_gradient(theta, batch(), rate, 1, 1.0, tanh_network)[1]):
            p.grad = g / tasks
        optimiser.step()
    return theta, batch()


def approximation(folder, seeds=range(10), trained=(0, 300), alpha=0.4):
    """Table of relative Frobenius error and angle to the exact block, median over networks; also as a file."""
    found = {}
    for iterations, steps, seed in itertools.product(trained, (1, 3), seeds):
        theta, batch = tiny_problem(seed, iterations, alpha)
        net = [boml.to_matrix(theta, n).detach().numpy() for n in boml.layers_of(theta)]
        signs = [torch.zeros(y.shape) for y in batch[1::2]]  # of no matter: no batch norm here
        exact = reference.adapted_fisher(net, list(zip(*(b.numpy() for b in batch))), alpha, steps)
        for form, (averaging, rate) in FORMS.items():
            cfg = boml.Config(averaging=averaging, exact_labels=True)
            a = alpha if rate is None else rate
            blocks = boml.adapted_curvature(theta, [(*batch, *signs)], torch.tensor([alpha], dtype=torch.double), steps,
                                            a, cfg, tanh_network)
            for pairs, rank in (("all pairs", 0), ("one pair", 1)):
                for l, (where, block) in enumerate(zip(reference.blocks(net), blocks.values())):
                    X, Y = dense(boml.merge(block, rank)), exact[where, where]
                    cosine = (X * Y).sum() / np.linalg.norm(X) / np.linalg.norm(Y)
                    key = f"{'trained' if iterations else 'untrained'}, k={steps}|{form}|{pairs}|layer {l + 1}"
                    error = np.linalg.norm(X - Y) / np.linalg.norm(Y)
                    found.setdefault(key, []).append((error, np.degrees(np.arccos(min(cosine, 1.0)))))
    medians = {key: [round(float(m), 3) for m in np.median(values, 0)] for key, values in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(nets=len(seeds), alpha=alpha,
                 measured="relative Frobenius error, angle in degrees: median over networks")
    (folder / "approximation.json").write_text(json.dumps(facts | dict(medians=medians), indent=1))
    lines = ["Relative Frobenius error / angle in degrees to the exact adapted Fisher; "
             f"median of {len(seeds)} networks"]
    for state in dict.fromkeys(key.split("|")[0] for key in medians):
        lines.append(f"{state:32}" + "".join(f"{f'layer {l}':>14}" for l in (1, 2, 3)))
        for form in FORMS:
            for pairs in ("all pairs", "one pair"):
                cells = [medians[f"{state}|{form}|{pairs}|layer {l}"] for l in (1, 2, 3)]
                lines.append(f"  {form:20}  {pairs:8}" + "".join(f"{e:9.2f} /{d:3.0f}" for e, d in cells))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def small_table(tmp_path_factory):
    """The table for one network, and its file."""
    folder = tmp_path_factory.mktemp("approximation") / "new"
    return approximation(folder, [0]), json.loads((folder / "approximation.json").read_text())


def nearest_pair(whole, P, O, clip):
    """The Kronecker product A (x) G nearest to a matrix, by the SVD of Van Loan's rearrangement of all of it."""
    rearranged = whole.reshape(P, O, P, O).transpose(0, 2, 1, 3).reshape(P * P, O * O)
    U, S, V = np.linalg.svd(rearranged)
    A, G = U[:, 0].reshape(P, P), S[0] * V[0].reshape(O, O)
    if np.trace(A) < 0:
        A, G = -A, -G
    if clip:
        A, G = ((v * np.maximum(e, 0)) @ v.T for e, v in (np.linalg.eigh((f + f.T) / 2) for f in (A, G)))
    return np.kron(A, G)


@functools.cache
def reference_case(trained, steps):
    """What the reference makes of the first tiny problem: network, exact matrix, K-FAC factors of both sets."""
    theta, batch = tiny_problem(0, 300 if trained else 0, 0.4)
    net = [np.column_stack([theta[f"linear{l}.weight"].detach(), theta[f"linear{l}.bias"].detach()]) for l in range(3)]
    tasks = list(zip(*(b.numpy() for b in batch)))
    support = [reference.kfac_factors(net, t[0]) for t in tasks]
    query = [reference.kfac_factors(reference.adapt(net, t[0], t[1], 0.4, steps)[1], t[2]) for t in tasks]
    return net, reference.adapted_fisher(net, tasks, 0.4, steps), support, query


def angle_between(X, Y):
    """In degrees, by half the sum and half the difference of the two unit vectors."""
    x, y = X / np.sqrt((X**2).sum()), Y / np.sqrt((Y**2).sum())
    return np.degrees(2 * np.arctan2(np.sqrt(((x - y) ** 2).sum()), np.sqrt(((x + y) ** 2).sum())))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trained, steps", [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_approximation_equals_reference(trained, steps, form, small_table):
    """Error and angle in the table are those of the reference's four terms against its exact adapted Fisher."""
    net, exact, support, query = reference_case(trained, steps)
    averaging, rate = dict(zip(FORMS, [("averages", 0), ("averages", 0.4), ("averages", 1), ("products", 0.4),
                                       ("products", 1)]))[form]
    for l, where in enumerate(reference.blocks(net)):
        factors = [[f[side][l] for f in fs] for fs in (support, query) for side in (0, 1)]
        whole, truth = reference.four_terms(*factors, rate, averaging), exact[where, where]
        O, P = net[l].shape
        for pairs, X in (("all pairs", whole), ("one pair", nearest_pair(whole, P, O, averaging == "products"))):
            state = f"{'trained' if trained else 'untrained'}, k={steps}"
            error, angle = small_table[1]["medians"][f"{state}|{form}|{pairs}|layer {l + 1}"]
            assert_close(error, np.sqrt(((X - truth) ** 2).sum() / (truth**2).sum()), rtol=0, atol=5.1e-4)
            assert_close(angle, angle_between(X, truth), rtol=0, atol=5.1e-4)


def test_approximation_prints_its_file(small_table):
    """The printed table has the numbers of the file, rounded, in order."""
    text, record = small_table
    printed = [(float(e), float(d)) for e, d in re.findall(r"([\d.]+) / *(\d+)", text)]
    states = dict.fromkeys(key.split("|")[0] for key in record["medians"])
    wanted = [record["medians"][f"{state}|{form}|{pairs}|layer {l}"] for state in states for form in FORMS
              for pairs in ("all pairs", "one pair") for l in (1, 2, 3)]
    assert len(printed) == 4 * 5 * 2 * 3 == len(record["medians"])
    assert printed == [(float(f"{e:.2f}"), float(f"{d:.0f}")) for e, d in wanted]


def test_approximation_is_a_median(tmp_path):
    """With three networks the table has the middle one's values, for error and angle each."""
    def medians(seeds):
        approximation(tmp_path, seeds, trained=(0,))
        return json.loads((tmp_path / "approximation.json").read_text())["medians"]

    alone = [medians([seed]) for seed in range(3)]
    for key, values in medians(range(3)).items():
        assert values == [sorted(one[key][i] for one in alone)[1] for i in (0, 1)]


def test_tiny_problem_is_trained():
    """Meta-training lowers the adapted network's loss on new tasks."""
    losses = []
    for iterations in (0, 300):
        theta, _ = tiny_problem(0, iterations, 0.4)
        net = [boml.to_matrix(theta, n).detach().numpy() for n in boml.layers_of(theta)]
        _, batch = tiny_problem(1, 0, 0.4, tasks=50)
        tasks = zip(*(b.numpy() for b in batch))
        losses.append(np.mean([reference.loss(reference.adapt(net, x_s, y_s, 0.4, 1)[1], x_q, y_q)
                               for x_s, y_s, x_q, y_q in tasks]))
    assert losses[1] < 0.8 * losses[0]


# The same on the real network, after real training, and what the penalty is worth there: does it predict forgetting?
# bash run.sh approximation --real BEFORE AFTER takes a run's checkpoints at the end of two stages and trains nothing.


def within(p, name):
    """A direction in one layer alone, or in "all"."""
    return {n: v if name == "all" or n.startswith(f"{name}.") else torch.zeros_like(v) for n, v in p.items()}


def directions(theta, move, T, rng):
    """Of each layer, for each of T tasks: random signs, for the trace; the move; and of conv layers their own weights,
    each filter with a random sign, for the sum of the forms along each filter. Of all layers together: the move."""
    random = lambda *shape: torch.randint(0, 2, (T, *shape), generator=rng) * 2.0 - 1
    signs = {n: random(*v.shape) for n, v in theta.items()}
    filters = {n: v.detach() * random(len(v), *[1] * (v.dim() - 1)) for n, v in theta.items()}
    found, moves = {}, {n: v.repeat(T, *[1] * v.dim()) for n, v in move.items()}
    for name in (*boml.layers_of(theta), "all"):
        found["move", name] = within(moves, name)
        if name != "all":
            found["trace", name] = within(signs, name)
        if name.startswith("conv"):
            found["filters", name] = within(filters, name)
    return found


def exact_forms(theta, batch, alpha, k, vectors):
    """v' J' F J v of each task for each v (T, ...): the exact adapted Fisher of Eq. 11, by products with vectors. J is
    the Jacobian of k steps, F the Fisher of the predictions for the whole query set, which batch norm ties together."""
    x_s, y_s, x_q, _ = batch
    p, found = boml.leaves(boml.spread(theta, len(x_s))), {}
    vectors = {key: [v[n] for n in p] for key, v in vectors.items()}
    for _ in range(k):
        loss = boml.cross_entropy(boml.network(p, x_s, second_order=True), y_s).sum()
        grads = torch.autograd.grad(loss, list(p.values()), create_graph=True)
        for key, v in vectors.items():  # the Jacobian of a step is I - alpha H, and H is symmetric
            product = torch.autograd.grad(grads, list(p.values()), v, retain_graph=True)
            vectors[key] = [a - alpha * b for a, b in zip(v, product)]
        p = boml.leaves({n: v - alpha * g for (n, v), g in zip(p.items(), grads)})
    logits = boml.network(p, x_q, second_order=True)
    prob, u = logits.detach().softmax(-1), torch.zeros_like(logits, requires_grad=True)
    grads = torch.autograd.grad(logits, list(p.values()), u, create_graph=True)  # linear in u
    for key, v in vectors.items():
        change, = torch.autograd.grad(grads, u, v, retain_graph=True)  # of the logits along v
        found[key] = (prob * (change - (prob * change).sum(-1, keepdim=True)) ** 2).sum(-1).mean(1)
    return found


def block_forms(block, move, own):
    """The same of a layer's block: trace, form along the move, and sum of the forms along each filter of `own`."""
    found = dict(move=(move * boml.times(block, move)).sum().item())
    diagonals = [f.diagonal(0, 1, 2) for f in block]
    if len(block) == 1:
        return found | dict(trace=diagonals[0].sum().item())
    filters = (diagonals[1] * (own @ block[0] * own).sum(2)).sum().item()
    return found | dict(trace=(diagonals[0].sum(1) * diagonals[1].sum(1)).sum().item(), filters=filters)


def distance(block, other):
    """Relative Frobenius distance of two sums of Kronecker pairs, by inner products of their factors."""
    size = lambda A, G: ((A @ A.T) * (G @ G.T)).sum().clamp(min=0).sqrt().item()
    (A, G), (B, K) = ([f.double().flatten(1) for f in pairs] for pairs in (block, other))
    return size(torch.cat([A, B]), torch.cat([G, -K])) / size(A, G)


def query_losses(theta, batches, alpha, k):
    """The meta-loss of each task: the mean query cross-entropy at its adapted parameters."""
    found = []
    for x_s, y_s, x_q, y_q in batches:
        p, _ = boml.adapt(boml.leaves(boml.spread(theta, len(x_s))), x_s, y_s, x_s.new_tensor([alpha]), k)
        with torch.no_grad():
            found.append(boml.cross_entropy(boml.network(p, x_q), y_q))
    return torch.cat(found)


def mean_and_error(values):
    return [values.mean().item(), values.std().item() / math.sqrt(len(values))]


def read_ends(before, after, folder):
    """Config, datasets and states of a run at the ends of its first two stages."""
    states = [torch.load(path, weights_only=True) for path in (before, after)]
    ends = [(state["stage"], state["iteration"], state["settings"]) for state in states]
    boml.need(ends == [(1, 0, ends[0][2]), (2, 0, ends[0][2])],
              f"{before} and {after} are not of one run, at the ends of its first two stages.")
    fields, data = {f.name for f in dataclasses.fields(boml.Config)}, []
    cfg = boml.Config(**{n: v for n, v in ends[0][2].items() if n in fields})
    for facts in states[1]["learned"][:2]:
        own = load(facts["name"], folder)
        boml.need(own.checksum == facts["checksum"], f"{folder} has other images of {own.name} than the run had.")
        data.append(own._replace(setting=own.setting._replace(**{n: facts[n] for n in boml.PER_DATASET})))
    return cfg, data, states


def real_case(cfg, data, states, seed, tasks=200, steps=(0.1, 0.3, 1.0)):
    """What theta's move in the second stage, and what shares of it, do to the loss of the first dataset, and what
    curvature makes of it, layer by layer. All pairs come from the tasks and draws that the run's own curvature had."""
    theta, after = ({n: v.detach() for n, v in state["theta"].items()} for state in states)
    move, rng, blocks, rows = {n: after[n] - v for n, v in theta.items()}, boml.stream("cpu", "approximation"), [], {}
    for t, p in enumerate((theta, after)):
        posterior = boml.Laplace(dataclasses.replace(cfg, merge_rank=0, past_weight=1.0), p)
        posterior.absorb(p, data[t], boml.stream("cpu", seed, "absorb", t))
        blocks.append(posterior.blocks)
    index = boml.sample_tasks(data[0], "train", tasks, cfg, rng)
    batches = [boml.fetch(data[0], one, cfg) for one in index.split(1)]
    alpha, k = data[0].setting.inner_rate, data[0].setting.inner_steps
    losses = functools.partial(query_losses, batches=batches, alpha=alpha, k=k)
    start = losses(theta)
    exact = [exact_forms(theta, b, alpha, k, directions(theta, move, 1, rng)) for b in batches]
    grads = [boml.meta_gradient(boml.leaves(theta), b, b[0].new_tensor([alpha]), k, 0.0)[1] for b in batches]
    for name in (*blocks[0], "all"):
        part, row = within(move, name), rows.setdefault(name, {})
        row["length"] = math.sqrt(sum(d.square().sum().item() for d in part.values()))
        slopes = [sum((g * d).sum() for g, d in zip(each, part.values())) for each in grads]
        row["slope"] = mean_and_error(torch.stack(slopes))
        row["rise"] = {s: mean_and_error(losses({n: v + s * part[n] for n, v in theta.items()}) - start) for s in steps}
        row["exact"] = {what: mean_and_error(torch.cat([f[what, name] for f in exact]))
                        for what in ("trace", "move", "filters") if (what, name) in exact[0]}
        if name == "all":
            for form in ("kfac", "four pairs"):
                row[form] = dict(move=sum(rows[n].get(form, rows[n]["kfac"])["move"] for n in blocks[0]))
            continue
        four, second = (each[name] for each in blocks)
        one = boml.merge(four, 1)
        forms = functools.partial(block_forms, move=boml.to_matrix(move, name), own=boml.to_matrix(theta, name))
        carried = states[0]["posterior"].get("blocks", {}).get(name)  # BomLA's own, lambda in the last factor
        carried = one if carried is None else (*carried[:-1], carried[-1] / cfg.past_weight)
        row["kfac"] = forms(carried)
        if len(four) == 2:
            row["four pairs"], row["no Jacobian"] = forms(four), forms(tuple(f[:1] for f in four))
            both = boml.merge(boml.add_blocks(one, second), 1)
            row["merged"] = [distance(four, one), distance(boml.add_blocks(four, second), both)]
            row["recomputed"] = distance(carried, one)
    return dict(datasets=[d.name for d in data], filters=cfg.filters, curvature_tasks=cfg.hessian_tasks, tasks=tasks,
                loss=mean_and_error(start), layers=rows)


def real_approximation(ends, folder, out):
    """Two tables for each run, in markdown; all numbers in out/approximation_real.json."""
    record, text = {}, []
    for before, after in ends:
        cfg, data, states = read_ends(before, after, folder)
        method, seed = (states[0]["settings"][key] for key in ("method", "seed"))
        record[f"{method}-{seed}"] = case = real_case(cfg, data, states, seed)
        title = f"{boml.METHODS[method].label}, {' to '.join(case['datasets'])}"
        near = [f"\n{title}: relative error of one Kronecker pair against four and eight; K-FAC divided by exact",
                "| layer | four | eight | trace | own filters | move | move, four pairs |", "|-|-|-|-|-|-|-|"]
        far = [f"\n{title}, at theta + s move: penalty / lambda; exact form; rise of loss {case['loss'][0]:.3f}",
               "| layer | slope | s = 0.1 | s = 0.3 | s = 1 |", "|-|-|-|-|-|"]
        for name, row in case["layers"].items():
            cells = [f"{e:.2f}" for e in row.get("merged", ())] or ["", ""]
            for what, form in (("trace", "kfac"), ("filters", "kfac"), ("move", "kfac"), ("move", "four pairs")):
                value, error = row["exact"].get(what, (math.nan, math.nan))
                ratio = row.get(form, {}).get(what, math.nan) / value
                cells.append("" if math.isnan(ratio) else f"{ratio:.2g} ± {ratio * error / value:.1g}")
            near.append(" | ".join([f"| {name}", *cells]) + " |")
            forms = row["kfac"]["move"], row["exact"]["move"][0]
            cells = ["; ".join([*(f"{s * s / 2 * form:.2g}" for form in forms), f"{rise:.2g} ± {error:.1g}"])
                     for s, (rise, error) in row["rise"].items()]
            far.append(" | ".join([f"| {name}", "{:.2g} ± {:.1g}".format(*row["slope"]), *cells]) + " |")
        text += near + far
    out.mkdir(parents=True, exist_ok=True)
    short = json.loads(json.dumps(record), parse_float=lambda v: float(f"{float(v):.4g}"))
    (out / "approximation_real.json").write_text(json.dumps(short, indent=1))
    return "\n".join(text)


def dense_adapted_fisher(theta, x_s, y_s, x_q, alpha, k):
    """Eq. 11 of one task in full, by plain code: the matrix on all parameters, one after another, and their slices."""
    sizes, names = [v.numel() for v in theta.values()], list(theta)
    flat = torch.cat([v.detach().flatten() for v in theta.values()])

    def logits(flat):
        p = {n: part.view_as(theta[n]) for n, part in zip(names, flat.split(sizes))}
        return boml.plain_network(plain_adapted(p, x_s, y_s, alpha, k), x_q)

    J, prob = torch.autograd.functional.jacobian(logits, flat), logits(flat.requires_grad_()).softmax(-1).detach()
    fisher = torch.diag_embed(prob) - prob[:, :, None] * prob[:, None]
    ends = np.cumsum(sizes)
    where = {n: slice(end - size, end) for n, end, size in zip(names, ends, sizes)}
    return torch.einsum("bip,bij,bjq->pq", J, fisher, J) / len(x_q), where


@settings(max_examples=3)
@given(seeds, st.integers(1, 3))
@doubles()
def test_exact_forms_equal_dense_ones(seed, k):
    """The quadratic form by products with vectors is that of the exact matrix, for every direction and task, also along
    the move of one layer or of all."""
    theta, batch = toy_batch(seed, way=3)
    move = {n: torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) for n, v in theta.items()}
    vectors = directions(theta, move, 2, torch.Generator().manual_seed(seed))
    found = exact_forms(theta, batch, 0.3, k, vectors)
    for t, (x_s, y_s, x_q, _) in enumerate(zip(*batch)):
        matrix, where = dense_adapted_fisher(theta, x_s, y_s, x_q, 0.3, k)
        for key, v in vectors.items():
            flat = torch.cat([v[n][t].flatten() for n in theta])
            assert_close(found[key][t], flat @ matrix @ flat, rtol=1e-7)
        for (what, name), v in vectors.items():
            if what == "move":
                assert all(torch.equal(v[n][t], move[n] * (name in ("all", n.split(".")[0]))) for n in theta)


@settings(max_examples=3)
@given(seeds)
@doubles()
def test_random_signs_estimate_traces(seed):
    """The mean over random signs approaches the trace of the exact matrix's block, the sum over unit vectors, and the
    sum of its forms along each filter of a conv layer."""
    T, (theta, batch) = 2000, toy_batch(seed, tasks=1, way=3)
    matrix, where = dense_adapted_fisher(theta, *(part[0] for part in batch[:3]), 0.3, 1)
    move = {n: torch.zeros_like(v) for n, v in theta.items()}
    for (what, name), v in directions(theta, move, T, torch.Generator().manual_seed(seed)).items():
        flat = torch.cat([v[n].flatten(1) for n in theta], 1)
        mean, error = mean_and_error(((flat @ matrix) * flat).sum(1))
        expected = sum(matrix[where[n], where[n]].trace() for n in theta if n.startswith(name))
        if what == "filters":
            w, s = theta[f"{name}.weight"].detach().flatten(1), where[f"{name}.weight"]
            expected = torch.einsum("op,opoq,oq->", w, matrix[s, s].view(*w.shape, *w.shape), w)
        if what != "move":
            assert abs(mean - expected) < 4.5 * error + 1e-12 and error < 0.1 * expected, (what, name)


@given(seeds, st.integers(1, 4))
def test_block_forms_equal_dense_ones(seed, pairs):
    """Trace, form along a move and sum of forms along filters are those of the dense matrix."""
    block, g = random_block(seed, pairs), torch.Generator().manual_seed(seed)
    move, own = torch.randn(2, 3, 4, generator=g, dtype=torch.double)
    matrix, found = torch.tensor(dense(block)), block_forms(block, move, own)
    assert_close(found["trace"], matrix.trace())
    assert_close(found["move"], move.T.flatten() @ matrix @ move.T.flatten())
    each = [(own * (torch.arange(3) == o)[:, None]).T.flatten() for o in range(3)]
    assert_close(found["filters"], sum(v @ matrix @ v for v in each))
    norm = (torch.randn(5, 2, 2, generator=g, dtype=torch.double),)
    D = torch.randn(5, 2, generator=g, dtype=torch.double)
    found = block_forms(norm, D, D)
    assert_close(found["trace"], np.trace(dense(norm)))
    assert_close(found["move"], D.flatten().numpy() @ dense(norm) @ D.flatten().numpy())


@given(seeds, st.integers(1, 4), st.integers(1, 3))
def test_distance_equals_dense_one(seed, pairs, rank):
    """The error of merged pairs by inner products of factors is the relative Frobenius error of the dense matrices."""
    block = random_block(seed, pairs)
    merged = boml.merge(block, rank)
    X, Y = dense(block), dense(merged)
    assert_close(distance(block, merged), np.linalg.norm(X - Y) / np.linalg.norm(X), rtol=1e-6, atol=1e-7)


@doubles()
def test_real_case_of_one_layer(monkeypatch):
    """Where conv2 alone has moved, its row is that of all and the others are zero: the penalty is BomLA's own, without
    Lambda_0 and lambda; exact form, slope and rise are those of plain code, on the first dataset's training classes."""
    cfg = toy_config(filters=2, way=3, channels=1, query=2, past_weight=7.0)
    one, two = toy_data(2, least=6, inner_rate=0.3, inner_steps=2), toy_data(3, least=6, name="mini_quickdraw")
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    wander(theta, 1)
    posterior = boml.Laplace(cfg, theta)
    posterior.absorb(theta, one, torch.Generator().manual_seed(4))
    after = {n: v.detach() + 0.1 * (n == "conv2.weight") for n, v in theta.items()}
    index = boml.sample_tasks(one, "train", 3, cfg, torch.Generator().manual_seed(5))
    sample = boml.sample_tasks
    monkeypatch.setattr(boml, "sample_tasks", lambda data, split, *rest:
                        index if data is one and split == "train" else sample(data, split, *rest))
    states = [dict(theta=theta, posterior=posterior.state()), dict(theta=after)]
    rows, D = real_case(cfg, [one, two], states, 0, tasks=3, steps=(1e-3, 1.0))["layers"], torch.full((2, 18), 0.1)
    batch, exact = boml.fetch(one, index, cfg), 0.0
    loss = lambda p: plain_loss(p, batch, rates(0.3), 2, 0.0) / 3
    slope = torch.autograd.grad(loss(theta), theta["conv2.weight"])[0].sum() * 0.1
    for x_s, y_s, x_q, _ in zip(*batch):
        matrix, where = dense_adapted_fisher(theta, x_s, y_s, x_q, 0.3, 2)
        exact += 0.01 * matrix[where["conv2.weight"], where["conv2.weight"]].sum() / 3
    for row in (rows["conv2"], rows["all"]):
        assert_close(7.0 * 0.5 * row["kfac"]["move"], posterior.penalty(boml.leaves(after))[0] - 0.5 * 1e-4 * (D * D).sum())
        assert_close(row["exact"]["move"][0], exact, rtol=1e-7)
        assert_close([row["slope"][0], row["length"]], [slope, D.norm()], rtol=1e-7)
        for s, (rise, _) in row["rise"].items():
            moved = boml.leaves({n: v + s * (after[n] - v) for n, v in theta.items()})
            assert_close(rise, loss(moved) - loss(theta), rtol=1e-6)
    for name in set(rows) - {"conv2", "all"}:
        row = rows[name]
        assert row["kfac"]["move"] == row["exact"]["move"][0] == row["slope"][0] == row["length"] == 0
        assert row["rise"] == {1e-3: [0, 0], 1.0: [0, 0]}


@doubles()
def test_real_case_merges_the_curvatures(monkeypatch):
    """Without BomLA's own blocks the penalty is that of the pair nearest to the first curvature, whatever lambda, beside
    those of all its pairs and of its first; the errors are of that pair, and of the one nearest to it and the second
    curvature, against all pairs."""
    cfg = toy_config(filters=2, way=3, channels=1, query=2, past_weight=7.0)
    data = toy_data(2), toy_data(3, name="mini_quickdraw")
    thetas = [boml.init_params(cfg, torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def made_up(theta, t):
        shapes = {name: boml.to_matrix(theta, name).shape for name in boml.layers_of(theta) if name[:4] != "norm"}
        return {name: random_block(t, 4, P, O, psd=True) for name, (O, P) in shapes.items()}

    def absorb(self, theta, data, rng):
        t = int(torch.equal(theta["conv1.weight"], thetas[1]["conv1.weight"]))
        self.blocks = {n: boml.merge((A, self.cfg.past_weight * G), self.cfg.merge_rank)
                       for n, (A, G) in made_up(theta, t).items()}

    monkeypatch.setattr(boml.Laplace, "absorb", absorb)
    states = [dict(theta=theta, posterior={}) for theta in thetas]
    rows = real_case(cfg, data, states, 0, tasks=2, steps=(1.0,))["layers"]
    for name in ("conv1", "conv2", "linear"):
        first, second = (dense(made_up(theta, t)[name]) for t, theta in enumerate(thetas))
        D = (boml.to_matrix(thetas[1], name) - boml.to_matrix(thetas[0], name)).detach()
        one = nearest_pair(first, D.shape[1], len(D), False)
        both = nearest_pair(one + second, D.shape[1], len(D), False)
        errors = [np.linalg.norm(x - y) / np.linalg.norm(x) for x, y in ((first, one), (first + second, both))]
        assert_close(rows[name]["merged"], errors, rtol=1e-6)
        term = dense(tuple(f[:1] for f in made_up(thetas[0], 0)[name]))
        for form, matrix in {"kfac": one, "four pairs": first, "no Jacobian": term}.items():
            assert_close(rows[name][form]["move"], D.T.flatten().numpy() @ matrix @ D.T.flatten().numpy(), rtol=1e-7)


def test_approximation_of_checkpoints(fake_data, tmp_path, monkeypatch, capsys):
    """The command takes the checkpoints of a run's first two stages in order, with the run's images, prints a table of
    curvatures and one of losses for each run, by layer, and writes its file alone."""
    sequence, line = ["omniglot", "mini_quickdraw"], ["--data", fake_data, *SMALL, "--methods", "maml,bomla"]
    for t in (1, 2):
        work_here("run", "--sequence", ",".join(sequence[:t]), *line, "--out", tmp_path)
        for method in ("maml", "bomla"):
            shutil.copy(tmp_path / f"run/{method}-0/checkpoint.pt", tmp_path / f"{method}-{t}.pt")
    monkeypatch.setattr(sys.modules[__name__], "real_case", functools.partial(real_case, tasks=2))
    pairs = {method: [str(tmp_path / f"{method}-{t}.pt") for t in (1, 2)] for method in ("maml", "bomla")}
    command = ["approximation", "--data", str(fake_data), "--out", str(tmp_path / "out")]
    main([*command, "--real", *pairs["maml"], "--real", *pairs["bomla"]])
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["approximation_real.json"]
    record = json.loads((tmp_path / "out/approximation_real.json").read_text())
    assert list(record) == ["maml-0", "bomla-0"] and record["maml-0"]["datasets"] == sequence
    rows = [line.split(" | ") for line in lines if re.match(r"\| (conv|norm|linear|all)", line)]
    assert [len(row) for row in rows] == ([7] * 10 + [5] * 10) * 2
    for row, (name, found) in zip(rows[30:], record["bomla-0"]["layers"].items(), strict=True):
        penalty, exact, rise = (float(cell.split(" ")[0]) for cell in row[4].removesuffix(" |").split("; "))
        assert row[0] == f"| {name}" and rise == float(f"{found['rise']['1.0'][0]:.2g}")
        assert_close([penalty, exact], [found["kfac"]["move"] / 2, found["exact"]["move"][0] / 2], rtol=0.06)
        assert found.get("recomputed", 0) < 1e-5
    for wrong in (pairs["maml"][::-1], [pairs["maml"][0], pairs["bomla"][1]]):
        with pytest.raises(SystemExit):
            main([*command, "--real", *wrong])
    assert capsys.readouterr().err.count("are not of one run") == 2


# ------------------------------------------------------------------------------------------------- Benchmark
# bash run.sh bench: each fast path of boml.py beside its plain version, interleaved in one run, one thread.
# A pair is (fast, plain): functions without arguments that do the same work on noise in the shape of the real thing.


def problem(tasks, query, channels, shot=1, filters=64):
    cfg = boml.Config(channels=channels, shot=shot, query=query, filters=filters)
    theta, g = boml.init_params(cfg, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    x = lambda n: torch.rand(tasks, 5 * n, channels, 28, 28, generator=g)
    y = lambda n: torch.arange(5).repeat_interleave(n).expand(tasks, -1)
    return cfg, theta, (x(shot), y(shot), x(query), y(query))


def step_pair(tasks, query, channels, alpha, k, chunks=boml.chunks, filters=64):
    _, theta, batch = problem(tasks, query, channels, filters=filters)
    rate = torch.tensor([alpha])

    def fast():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(boml, "chunks", chunks)
            return boml.meta_gradient(theta, batch, rate, k, 1.0)

    def plain():
        loss = plain_loss(theta, batch, torch.tensor([alpha]), k, 1.0)
        return loss.detach(), torch.autograd.grad(loss, list(theta.values()))

    return fast, plain


def curvature_pair(tasks, query, filters=64):
    cfg, theta, batch = problem(tasks, query, 3, filters=filters)
    cfg, g = dataclasses.replace(cfg, averaging="products"), torch.Generator().manual_seed(2)
    batch = (*batch, *(torch.rand(y.shape, generator=g) for y in batch[1::2]))
    return (lambda: boml.adapted_curvature(theta, [batch], torch.tensor([0.4]), 1, 0.4, cfg),
            lambda: plain_curvature(theta, batch, 0.4, 1, 0.4))


def variational_pair(tasks, query, samples, filters=64):
    cfg, theta, batch = problem(tasks, query, 3, filters=filters)
    posterior, rate = boml.Variational(dataclasses.replace(cfg, mc_samples=samples), theta), torch.tensor([0.4])
    rngs = lambda: [torch.Generator().manual_seed(m) for m in range(tasks)]

    def plain():
        loss = plain_variational(posterior, theta, batch, 0.4, 1, [[rng] * samples for rng in rngs()])
        return loss.detach(), torch.autograd.grad(loss, [*theta.values(), *posterior.logvar.values()])

    return lambda: posterior.gradient(theta, batch, rate, 1, rngs()), plain


def evaluation_pair(tasks, filters=64):
    cfg = boml.Config(eval_tasks=tasks, query=3, filters=filters)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    data = toy_data(0, classes=30, least=4, most=4, channels=3, name="cifar_fs", eval_steps=10)

    def plain():
        index = boml.sample_tasks(data, "test", tasks, cfg, boml.stream("cpu", 0, "evaluate", data.name))
        return plain_accuracy(theta, boml.fetch(data, index, cfg), data.setting.inner_rate, 10).mean()

    return lambda: boml.evaluate(theta, boml.Posterior(cfg, theta), data, cfg, 0), plain


BENCH = {
    "meta-step, T=32, 75 queries, 1 channel, k=1": lambda: step_pair(32, 15, 1, 0.4, 1),
    "meta-step, T=32, 75 queries, 3 channels, k=1": lambda: step_pair(32, 15, 3, 0.4, 1),
    "meta-step, T=32, 75 queries, 3 channels, k=5": lambda: step_pair(32, 15, 3, 0.1, 5),
    "the same in one pass, as on a GPU": lambda: step_pair(32, 15, 3, 0.1, 5, lambda *_: [slice(None)]),
    "meta-step, cpu schedule (T=4, 25 queries), k=1": lambda: step_pair(4, 5, 3, 0.4, 1),
    "meta-step, cpu schedule (T=4, 25 queries), k=5": lambda: step_pair(4, 5, 3, 0.1, 5),
    "K-FAC, T=8, 75 queries": lambda: curvature_pair(8, 15),
    "BomVI step, T=1, 75 queries, 20 samples": lambda: variational_pair(1, 15, 20),
    "evaluation, 20 tasks, 10 steps": lambda: evaluation_pair(20),
}


def assert_same_gradient(pair):
    (loss, grads), (plain, plain_grads) = (call() for call in pair)
    assert_close(loss, plain)
    assert len(grads) == len(plain_grads)
    for g, e in zip(grads, plain_grads):
        assert_close(g, e, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("chunks", [boml.chunks, lambda *_: [slice(None)]])
@pytest.mark.parametrize("channels, k", [(1, 1), (3, 2)])
@doubles()
def test_benchmark_of_a_step(channels, k, chunks):
    """Both sides of the benchmark's meta-step, a task at a time or in one pass, have one loss and gradient."""
    assert_same_gradient(step_pair(3, 2, channels, 0.4, k, chunks, filters=4))


@doubles()
def test_benchmark_of_a_variational_step():
    """Both sides of the benchmark's BomVI step have one loss and gradient for one sample, where their noise is one."""
    assert_same_gradient(variational_pair(2, 2, 1, filters=4))


@doubles()
def test_benchmark_of_curvature():
    """Both sides of the benchmark's K-FAC have the same sums of factors."""
    blocks, plain = (call() for call in curvature_pair(3, 2, filters=4))
    for name, expected in plain.items():
        if len(expected) == 1:
            assert_close(blocks[name][0], expected[0] / 3, rtol=1e-7, atol=1e-9)
            continue
        A, G = (torch.stack(terms) / 3 for terms in (expected[:4], expected[4:]))
        G = G * torch.tensor([1, -0.4, -0.4, 0.16])[:, None, None]
        for found, e in zip(blocks[name], (A, G)):
            assert_close(found / e.abs().max(), e / e.abs().max(), rtol=1e-7, atol=1e-9)


@doubles()
def test_benchmark_of_evaluation():
    """Both sides of the benchmark's evaluation have the same accuracy."""
    fast, plain = (call() for call in evaluation_pair(6, filters=4))
    assert_close(fast["accuracy"], plain)


def bench_memory(name, which):
    """In a process of its own: megabytes that one call adds to the peak."""
    call = BENCH[name]()[which]
    kilobytes = lambda what: int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
    call()
    print((kilobytes("VmHWM") - before) / 1024)


def bench_processes(processes, data):
    """Seconds of a short run by one process with two threads, or under torchrun by two with one each."""
    alone = "import boml, sys; args = boml.parse(sys.argv[1:]); boml.work(args, lambda share: False)"
    start = ["-c", alone] if processes == 1 else [
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(boml.HERE / "boml.py")]
    line = ("run --sequence generated_textures --method maml --iterations 10 --meta-batch 8 --eval-tasks 2 "
            "--schedule cpu --device cpu").split()
    with tempfile.TemporaryDirectory() as out:
        env = os.environ | {"OMP_NUM_THREADS": str(2 // processes), "PYTHONPATH": str(boml.HERE)}
        subprocess.run([sys.executable, *start, *line, "--data", str(data), "--out", out], env=env, capture_output=True,
                       check=True)
        return json.loads((Path(out) / "run/maml-0/record.jsonl").read_text().splitlines()[-1])["seconds"]


def bench_penalty(cfg, theta, datasets):
    """The penalty of BomLA after some datasets, as a function without arguments."""
    posterior = boml.Laplace(cfg, theta)
    for _ in range(datasets):
        for name in boml.layers_of(theta):
            O, P = boml.to_matrix(theta, name).shape
            block = (torch.rand(O, 2, 2),) if name.startswith("norm") else (torch.rand(1, P, P), torch.rand(1, O, O))
            block = boml.add_blocks(posterior.blocks[name], block) if name in posterior.blocks else block
            posterior.blocks[name] = boml.merge(block, 1)
    return lambda: posterior.penalty(theta)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bench_row(name, make, peak, repeats):
    """A line of the table, printed."""
    from torch.utils.flop_counter import FlopCounterMode

    fast, plain = make()
    fast()
    with FlopCounterMode(display=False) as flops:  # which overstates grouped convolutions, as in BomVI's plain version
        fast() if name.startswith("BomVI") else plain()
    quick, slow = np.median([[seconds(fast), seconds(plain)] for _ in range(repeats)], 0)
    lines = [[sys.executable, __file__, "memory", name, str(which)] for which in (0, 1)]
    memory = [float(subprocess.run(line, capture_output=True, text=True, check=True).stdout) for line in lines]
    gflop = flops.get_total_flops() / 1e9
    row = dict(plain_seconds=slow, seconds=quick, ratio=slow / quick, plain_mb=memory[1], mb=memory[0], gflop=gflop,
               peak_share=gflop / quick / peak)
    print(f"{name:50}{slow:8.3f}s{quick:8.3f}s{slow / quick:7.2f}{100 * row['peak_share']:8.0f}%{memory[1]:8.0f}MB"
          f"{memory[0]:7.0f}MB", flush=True)
    return row


class Kernels(TorchDispatchMode):
    """Counts the operations that a GPU would launch, their FLOP and the bytes that they read and write; what the host
    does, views and allocations are left out."""

    free = "_unsafe_view", "empty", "empty_like", "new_empty", "scalar_tensor"

    def __init__(self):
        super().__init__()
        self.seen, self.flop, self.bytes = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **kwargs or {}), func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and not t.is_cpu]
        if tensors and not func.is_view and name not in self.free:
            self.seen[name] += 1
            self.bytes += sum(t.numel() * t.itemsize for t in tensors)
        if name == "bmm":
            self.flop += 2 * out.numel() * args[0].shape[2]
        elif name == "convolution":
            self.flop += 2 * out.numel() * args[1][0].numel()
        elif name == "convolution_backward":  # in input and weight
            self.flop += 4 * args[0].numel() * args[2][0].numel()
        return out


def kernels_of(method, names, samples=20):
    """Of a first training step of the paper's size on tensors without values, which take the path of a GPU."""
    cfg, batch = boml.Config(mc_samples=samples), []
    for j, name in enumerate(names):
        data = moved(toy_data(0, name=name, inner_steps=boml.DATASETS[name].inner_steps), "meta")
        batch.append((data, torch.empty(len(range(j, 32, len(names))), 5, 16, dtype=torch.long, device="meta")))
    theta = boml.init_params(cfg, None, "meta")
    posterior = boml.METHODS[method].posterior(cfg, theta)
    optimiser = torch.optim.Adam(posterior.parameters(theta), foreach=True)  # as torch has it on a GPU
    with Kernels() as kernels:
        boml.meta_step(theta, posterior, optimiser, batch, cfg, lambda m: None)
    return kernels


GPU_STEPS = {  # and the most kernels that each may have
    "Sequential MAML, k=5": ("maml", ["cifar_fs"], 2900),
    "Train-On-Everything, k=1, 3 and 5": ("toe", ["omniglot", "mini_quickdraw", "cifar_fs"], 5300),
    "BomVI, k=1, 20 samples": ("bomvi", ["omniglot"], 12000),
}


@pytest.mark.parametrize("name", GPU_STEPS)
def test_kernels_are_few(name):
    """A training step on a GPU has no more kernels than it may; BomVI's grow linearly with its samples."""
    method, names, most = GPU_STEPS[name]
    one, *two = (kernels_of(method, names, samples).seen.total() for samples in ((1, 2) if method == "bomvi" else (1,)))
    assert one + sum(19 * (n - one) for n in two) <= most


def bench_kernels():
    """Rows of kernels, and a time from 5 us to launch each, or 10 TFLOP/s and 1 TB/s if that takes longer."""
    print(f"\n{'a training step on a GPU: T=32, 75 queries':50}{'kernels':>9}{'GFLOP':>9}{'GB':>7}{'estimate':>10}")
    rows = {}
    for name, (method, names, _) in GPU_STEPS.items():
        found = kernels_of(method, names)
        kernels, gflop, gb = found.seen.total(), found.flop / 1e9, found.bytes / 1e9
        seconds = max(5e-6 * kernels, gflop / 1e4 + gb / 1e3)
        rows[f"GPU: {name}"] = dict(kernels=kernels, gflop=gflop, gb=gb, seconds=seconds)
        print(f"{name:50}{kernels:9,}{gflop:9.0f}{gb:7.1f}{1000 * seconds:8.0f}ms", flush=True)
    return rows


def bench(repeats=3):
    """Medians of interleaved calls, as ratios; writes runs/bench.json."""
    a = torch.rand(2048, 2048)
    peak = 2 * 2.048**3 / min(seconds(lambda: a @ a) for _ in range(10))  # GFLOP/s
    facts = dict(threads=1, load=os.getloadavg()[0], peak_gflops=peak, torch=torch.__version__)
    print(f"one thread, load {facts['load']:.1f}, matrix multiplication peaks at {peak:.0f} GFLOP/s")
    print(f"{'':50}{'plain':>9}{'boml.py':>9}{'ratio':>7}{'of peak':>9}{'plain':>10}{'boml.py':>9}")
    rows = {name: bench_row(name, make, peak, repeats) for name, make in BENCH.items()} | bench_kernels()

    data, cfg = toy_data(0, classes=300, most=20, least=20), boml.Config(query=5, meta_batch=4)
    rng = torch.Generator()
    draw = lambda: boml.fetch(data, boml.sample_tasks(data, "train", 4, cfg, rng), cfg)
    sample, theta = np.median([seconds(draw) for _ in range(50)]), boml.init_params(cfg, rng)
    penalty = {}
    for datasets in (3, 50):
        call = bench_penalty(cfg, theta, datasets)
        penalty[datasets] = np.median([seconds(call) for _ in range(50)])
    rows["sampling 4 tasks"], rows["penalty"] = dict(seconds=sample), {f"after {d}": s for d, s in penalty.items()}
    step = rows["meta-step, cpu schedule (T=4, 25 queries), k=1"]["seconds"]
    print(f"sampling a meta-batch: {100 * sample / step:.1f} % of the shortest step; penalty after 3 datasets "
          f"{1000 * penalty[3]:.1f} ms, after 50 {1000 * penalty[50]:.1f} ms")

    with tempfile.TemporaryDirectory() as folder:
        data_prep.make("generated_textures", None, Path(folder))
        one, two = np.median([[bench_processes(n, folder) for n in (1, 2)] for _ in range(repeats)], 0)
    rows["torchrun"] = {"1 process, 2 threads": one, "2 processes, 1 thread": two}
    print(f"torchrun, meta-batches of 8 tasks: 2 processes with a thread each are {one / two:.2f} times as fast as 1 "
          "with 2")
    (boml.HERE / "runs").mkdir(exist_ok=True)
    (boml.HERE / "runs" / "bench.json").write_text(json.dumps(facts | dict(rows=rows), indent=1))


def main(argv):
    parser = argparse.ArgumentParser("test_boml.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measure boml.py against plain versions of the same work")
    memory = commands.add_parser("memory", help="of a row of the benchmark: 0 for boml.py's side, 1 for the plain one")
    memory.add_argument("name", choices=BENCH)
    memory.add_argument("which", type=int, choices=(0, 1))
    table = commands.add_parser("approximation", help="measure BomLA's curvature against the exact one")
    table.add_argument("--out", type=Path, default=boml.HERE / "runs", help="folder of the file of results")
    table.add_argument("--real", nargs=2, type=Path, action="append", metavar=("BEFORE", "AFTER"),
                       help="a run's checkpoints at the ends of its first two stages; may be repeated")
    table.add_argument("--data", type=Path, default=boml.HERE / "data", help="folder of <name>.npz")
    args = parser.parse_args(argv)
    if args.command == "bench":
        bench()
    elif args.command == "memory":
        bench_memory(args.name, args.which)
    elif args.real:
        boml.one_sentence(lambda: print(real_approximation(args.real, args.data, args.out)))
    else:
        print(approximation(args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
