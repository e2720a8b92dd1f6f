"""What boml.py promises, as properties. Sizes and seeds are drawn by hypothesis, arrays from the seed; float64.

The plain versions that the properties compare with are also what `bash run.sh bench` measures boml.py against (the end).
"""
import dataclasses, gzip, hashlib, http.server, io, json, math, os, pickle, queue, re, resource, shutil, signal, struct, subprocess, sys, tarfile
import tempfile, threading, time, zipfile, zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from PIL import Image

import boml
import data_prep
import reference_numpy as reference

settings.register_profile("boml", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("boml")
torch.set_num_threads(1)
HERE = Path(__file__).parent
RAW = HERE.parent / "shared" / "raw"  # real archives, used where they are there
seeds = st.integers(0, 10**6)


def assert_close(a, b, rtol=1e-9, atol=1e-11):
    """Equal within tolerance; else says where they differ most, by how much, and their ratio."""
    a, b = (x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    bad = abs(a - b) - (atol + rtol * abs(b))
    if not (bad <= 0).all():
        i = np.unravel_index(np.where(np.isnan(bad), np.inf, bad).argmax(), bad.shape)
        raise AssertionError(f"worst at {i}: {a[i]!r} against {b[i]!r}, ratio {a[i] / b[i] if b[i] else np.inf}")


def toy_config(**changes):
    small = dict(filters=4, query=2, meta_batch=2, eval_tasks=2, hessian_tasks=3, mc_samples=2)
    return dataclasses.replace(boml.Config(), **small | changes)


def toy_data(seed=0, classes=15, least=4, most=7, turns=1, channels=1, name="omniglot", device="cpu", iterations=3):
    """A dataset of noise, its classes of different sizes."""
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(least, most + 1, (classes,), generator=g)
    images = torch.randint(0, 256, (int(count.sum()), channels, 28, 28), generator=g, dtype=torch.uint8)
    third = classes // 3
    splits = {s: torch.arange(a * third, (a + 1) * third) for a, s in enumerate(("train", "val", "test"))}
    setting = boml.DATASETS[name]._replace(inner_steps=1, eval_steps=1, turns=turns, iterations=iterations)
    return boml.Dataset(
        name, "real", [f"{c // 5}/{c % 5}" for c in range(classes)], setting, images.to(device),
        (count.cumsum(0) - count).to(device), count.to(device), {s: c.to(device) for s, c in splits.items()}, most)


def toy_batch(seed, tasks=2, shot=1, query=2, way=5, channels=1):
    """x_s, y_s, x_q, y_q of random images, and parameters, in float64."""
    g = torch.Generator().manual_seed(seed)
    x = lambda n: torch.rand(tasks, way * n, channels, 28, 28, generator=g, dtype=torch.double)
    y = lambda n: torch.arange(way).repeat_interleave(n).expand(tasks, -1)
    theta = boml.init_params(toy_config(way=way, channels=channels), g)
    theta = boml.leaves({n: (v + 0.1 * torch.randn(v.shape, generator=g)).double() for n, v in theta.items()})
    return theta, (x(shot), y(shot), x(query), y(query))


# ----------------------------------------------------------------------------------------- Network, adaptation


def plain_logits(p, x, bias=None):
    """One network on x (B, C, 28, 28), layer by layer as one would write it."""
    for i in range(1, 5):
        x = F.conv2d(x, p[f"conv{i}.weight"], bias, padding=1)
        x = F.batch_norm(x, None, None, p[f"norm{i}.weight"], p[f"norm{i}.bias"], training=True)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), p["linear.weight"], p["linear.bias"])


def plain_loss(theta, batch, rate, steps, support_weight, second_order=True):
    """The objective as a loop over tasks, one graph."""
    total = 0
    for x_s, y_s, x_q, y_q in zip(*batch):
        total = total + support_weight * F.cross_entropy(plain_logits(theta, x_s), y_s)
        p = theta
        for _ in range(steps):
            loss = F.cross_entropy(plain_logits(p, x_s), y_s)
            grads = torch.autograd.grad(loss, list(p.values()), create_graph=second_order)
            p = {n: v - rate * g for (n, v), g in zip(p.items(), grads)}
        total = total + F.cross_entropy(plain_logits(p, x_q), y_q)
    return total


def plain_adapt(p, x, y, rate, steps):
    """First-order adaptation of one network."""
    for _ in range(steps):
        p = {n: v.detach().requires_grad_() for n, v in p.items()}
        grads = torch.autograd.grad(F.cross_entropy(plain_logits(p, x), y), list(p.values()))
        p = {n: v - rate * g for (n, v), g in zip(p.items(), grads)}
    return {n: v.detach().requires_grad_() for n, v in p.items()}


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
            g = torch.stack([(g * normal).sum((2, 3)), g.sum((2, 3))], -1)
            factors[name] = (torch.einsum("bci,bcj->cij", g, g) / len(x),)
        else:
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
            factors[name] = x.T @ x / len(x), g.T @ g / len(x)
    return factors


def plain_curvature(theta, batch, rate, steps, a):
    """The sum over tasks of the four Kronecker terms, task by task, support and query on their own."""
    sums = {}
    for x_s, y_s, x_q, _, u_s, u_q in zip(*batch):
        support = plain_factors(theta, x_s, u_s)
        query = plain_factors(plain_adapt(theta, x_s, y_s, rate, steps), x_q, u_q)
        for name, s in support.items():
            q = query[name]
            if len(s) == 1:
                J = torch.eye(2, dtype=s[0].dtype) - a * s[0]
                new = [J @ q[0] @ J.mT]
            else:
                new = [f for X, X_q in zip(s, q) for f in (X_q, X @ X_q, X_q @ X, X @ X_q @ X)]
            sums[name] = [x + y for x, y in zip(sums[name], new)] if name in sums else new
    return sums


def plain_variational(posterior, theta, batch, rate, steps, rngs):
    """BomVI's objective with all S samples at once, a task at a time, one graph; a generator for each task and sample."""
    total, S = 0, len(rngs[0])
    samples = lambda p, x, y, r: boml.cross_entropy(boml.network(
        boml.spread(p, S), x.expand(S, *x.shape),
        boml.noisy_layer(boml.spread({n: v.exp() for n, v in posterior.extra.items()}, S), r)), y.expand(S, -1)).mean()
    for x_s, y_s, x_q, y_q, r in zip(*batch, rngs):
        p = theta
        for _ in range(steps):
            grads = torch.autograd.grad(F.cross_entropy(plain_logits(p, x_s), y_s), list(p.values()), create_graph=True)
            p = {n: v - rate * g for (n, v), g in zip(p.items(), grads)}
        total = total + samples(p, x_q, y_q, r) + samples(theta, x_s, y_s, r)
    return total


def plain_accuracy(theta, batch, rate, steps):
    """Of each task, adapted on its own."""
    return torch.stack([(plain_logits(plain_adapt(theta, x_s, y_s, rate, steps), x_q).argmax(-1) == y_q).double().mean()
                        for x_s, y_s, x_q, y_q in zip(*batch)])


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3]))
def test_curvature_equals_plain_loop(seed, tasks, steps, channels):
    """On the real network the batched curvature is that of a plain per-task loop with unfolding, labels drawn alike."""
    theta, batch = toy_batch(seed, tasks, channels=channels)
    g = torch.Generator().manual_seed(seed)
    batch += tuple(torch.rand(y.shape, generator=g, dtype=torch.double) for y in (batch[1], batch[3]))
    blocks = boml.adapted_curvature(theta, [batch], 0.4, steps, 0.4, toy_config(averaging="products"))
    for name, expected in plain_curvature(theta, batch, 0.4, steps, 0.4).items():
        if len(expected) == 1:
            assert_close(blocks[name][0], expected[0] / tasks, rtol=1e-7, atol=1e-9)
            continue
        for f, e in zip(blocks[name], (expected[:4], expected[4:])):
            scale = torch.tensor([1, -0.4, -0.4, 0.16])[:, None, None].double() if f is blocks[name][1] else 1.0
            e = torch.stack(e) * scale / tasks
            assert_close(f / e.abs().max(), e / e.abs().max(), rtol=1e-7, atol=1e-9)


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(3, 6), st.integers(3, 6))
def test_gram_matrix_of_patches(seed, tasks, batch, channels, height, width):
    """The Gram matrix by autocorrelations is that of the patches themselves, borders and corners included."""
    x = torch.randn(batch, tasks * channels, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    u = boml.patches(x, tasks)
    assert_close(boml.patch_gram(x, tasks), u @ u.mT, atol=1e-10)


@given(seeds, st.integers(1, 2), st.integers(1, 2))
def test_variational_gradient_equals_plain_one(seed, tasks, steps):
    """A sample after the other gives the objective and gradient of all samples at once, noise being the same."""
    theta, batch = toy_batch(seed, tasks)
    posterior = variational(theta, -4.0, mc_samples=1)
    make = lambda m, s: torch.Generator().manual_seed(seed + 10 * m + s)
    parts = [posterior.gradient(theta, batch, 0.4, steps, [make(m, s) for m in range(tasks)]) for s in range(3)]
    plain = plain_variational(posterior, theta, batch, 0.4, steps, [[make(m, s) for s in range(3)] for m in range(tasks)])
    assert_close(sum(loss for loss, _ in parts) / 3, plain)
    params = [*theta.values(), *posterior.extra.values()]
    for g, e in zip(zip(*(grads for _, grads in parts)), torch.autograd.grad(plain, params)):
        assert_close(sum(g) / 3, e, rtol=1e-6, atol=1e-9)


@given(seeds, st.integers(1, 3))
def test_batched_adaptation_equals_plain_loop(seed, steps):
    """Evaluation adapts all tasks at once to the parameters that each would come to on its own."""
    theta, (x_s, y_s, x_q, y_q) = toy_batch(seed, 3)
    adapted, _ = boml.adapt(boml.leaves(boml.spread(theta, 3)), x_s, y_s, 0.4, steps)
    for m in range(3):
        for n, v in plain_adapt(theta, x_s[m], y_s[m], 0.4, steps).items():
            assert_close(adapted[n][m], v, rtol=1e-7, atol=1e-9)


@given(seeds, st.sampled_from([0.1, 0.4]), st.integers(1, 3))
def test_evaluation_equals_plain_loop(seed, rate, steps):
    """Every dataset is evaluated with its own alpha and number of steps, and scored as by a plain loop over its tasks."""
    theta, _ = toy_batch(seed)
    data, cfg = toy_data(seed), toy_config(channels=1, eval_tasks=6)
    data = data._replace(setting=data.setting._replace(inner_rate=rate, eval_steps=steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_default_dtype", lambda: torch.double)  # of the images
        found = boml.evaluate(theta, boml.Point(cfg, theta), data, cfg, seed)
        index = boml.sample_tasks(data, "test", 6, cfg, boml.stream("cpu", seed, "evaluate", data.name))
        batch = boml.fetch(data, index, cfg)
    assert_close(found["accuracy"], plain_accuracy(theta, batch, rate, steps).mean())


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 1.0]), st.sampled_from([1, 3]))
def test_meta_gradient_equals_plain_loop(seed, tasks, steps, support_weight, channels):
    """The batched loss and meta-gradient are those of a plain per-task loop."""
    theta, batch = toy_batch(seed, tasks, channels=channels)
    loss, grads = boml.meta_gradient(theta, batch, 0.4, steps, support_weight)
    expected = plain_loss(theta, batch, 0.4, steps, support_weight)
    assert_close(loss, expected)
    for g, e in zip(grads, torch.autograd.grad(expected, list(theta.values()))):
        assert_close(g, e, rtol=1e-7, atol=1e-10)


@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 1.0]))
def test_meta_gradient_equals_finite_differences(seed, steps, support_weight):
    """Along a random direction the meta-gradient is the central difference of the loss.

    The step is tiny because a ReLU or a maximum that flips inside it makes the adapted loss jump.
    """
    theta, batch = toy_batch(seed)
    g = torch.Generator().manual_seed(seed + 1)
    direction = {n: torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in theta.items()}
    loss = lambda e: plain_loss({n: v + e * direction[n] for n, v in theta.items()}, batch, 0.4, steps, support_weight)
    _, grads = boml.meta_gradient(theta, batch, 0.4, steps, support_weight)
    slope = sum((a * b).sum() for a, b in zip(grads, direction.values()))
    assert_close(slope, (loss(1e-9) - loss(-1e-9)) / 2e-9, rtol=1e-4, atol=1e-5)


@given(seeds)
def test_meta_gradient_is_not_first_order(seed):
    """Leaving the adaptation's own derivative out gives another gradient."""
    theta, batch = toy_batch(seed)
    _, grads = boml.meta_gradient(theta, batch, 0.4, 1, 0.0)
    first_order = torch.autograd.grad(plain_loss(theta, batch, 0.4, 1, 0.0, second_order=False), list(theta.values()))
    apart = torch.cat([(a - b).flatten() for a, b in zip(grads, first_order)]).norm()
    assert apart > 0.01 * torch.cat([b.flatten() for b in first_order]).norm()


@given(seeds, st.integers(1, 5))
def test_zero_rate_adapts_nothing(seed, steps):
    """With alpha = 0 adaptation is the identity."""
    theta, (x_s, y_s, _, _) = toy_batch(seed)
    p = boml.spread(theta, len(x_s))
    for a, b in zip(boml.adapt(p, x_s, y_s, 0.0, steps)[0].values(), p.values()):
        assert torch.equal(a, b)


@given(seeds, st.permutations(range(5)))
def test_relabelling_classes(seed, order):
    """Permuting the labels together with the last layer's rows leaves the loss and permutes the gradient."""
    theta, (x_s, y_s, x_q, y_q) = toy_batch(seed)
    order = torch.tensor(order)
    loss, grads = boml.meta_gradient(theta, (x_s, y_s, x_q, y_q), 0.4, 2, 1.0)
    renamed = boml.leaves({n: v[order.argsort()] if n.startswith("linear") else v for n, v in theta.items()})
    loss2, grads2 = boml.meta_gradient(renamed, (x_s, order[y_s], x_q, order[y_q]), 0.4, 2, 1.0)
    assert_close(loss, loss2)
    for name, g, g2 in zip(theta, grads, grads2):
        assert_close(g2[order] if name.startswith("linear") else g2, g, rtol=1e-7, atol=1e-9)


@given(seeds)
def test_conv_bias_cancels(seed):
    """The network's logits are those of one with any conv biases, which is why it has none."""
    theta, (x_s, *_) = toy_batch(seed)
    bias = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    logits = boml.network(boml.spread(theta, 1), x_s[:1])[0]
    assert_close(plain_logits(theta, x_s[0], bias), logits, rtol=1e-8, atol=1e-9)


@given(seeds)
def test_norm_uses_the_batch(seed):
    """Batch norm has each task's own statistics: another task in the meta-batch changes nothing."""
    theta, (x_s, *_) = toy_batch(seed, tasks=3)
    together = boml.network(boml.spread(theta, 3), x_s)
    assert_close(boml.network(boml.spread(theta, 1), x_s[1:2]), together[1:2])


# ----------------------------------------------------------------------------------------------------- Laplace
# The tiny tanh network of reference_numpy.py, run by boml's own code.


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
    """The matrix that a block stands for."""
    return torch.block_diag(*block[0]).detach().numpy() if len(block) == 1 else boml.dense(block)


def random_block(seed, pairs, P=4, O=3, psd=False):
    """A symmetric sum of Kronecker pairs: each non-symmetric pair comes with its transpose, as the cross terms do."""
    g = torch.Generator().manual_seed(seed)
    A, G = (torch.randn(pairs, n, n, generator=g, dtype=torch.double) for n in (P, O))
    return (A @ A.mT, G @ G.mT) if psd else (torch.cat([A, A.mT]), torch.cat([G, G.mT]))


def curvature(theta, batch, rate, steps, a, averaging="averages", **changes):
    cfg = toy_config(averaging=averaging, **dict(exact_labels=True) | changes)
    batch = (*batch, *(torch.zeros(y.shape) for y in batch[1::2]))
    return boml.adapted_curvature(theta, [batch], rate, steps, a, cfg, boml.tanh_network)


def laplace(blocks, mean, **changes):
    posterior = boml.Laplace(toy_config(**changes), {})
    posterior.mean, posterior.blocks = mean, blocks
    return posterior


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
    blocks = boml.fisher_blocks(boml.spread(theta, 1), batch[2], torch.zeros(batch[3].shape), True, boml.tanh_network)
    exact = reference.fisher(net, tasks[0][2])
    for block, s in zip(blocks.values(), reference.blocks(net)):
        assert_close(dense(block), exact[s, s])


@given(seeds)
def test_exact_on_a_linear_network_of_one_layer_and_equal_probabilities(seed):
    """Where G does not depend on the input, as for zero weights of a linear softmax, K-FAC is exact on many examples."""
    net, theta, tasks, batch = tiny(seed, sizes=(3, 4), tasks=1, weight=0.0)
    blocks = boml.fisher_blocks(boml.spread(theta, 1), batch[2], torch.zeros(batch[3].shape), True, boml.tanh_network)
    assert_close(dense(blocks["linear0"]), reference.fisher(net, tasks[0][2]))


@given(seeds)
def test_kfac_factors_equal_reference(seed):
    """A and G of every layer and task are the reference's."""
    net, theta, tasks, batch = tiny(seed)
    blocks = boml.fisher_blocks(boml.spread(theta, 2), batch[2], torch.zeros(batch[3].shape), True, boml.tanh_network)
    for m, task in enumerate(tasks):
        A, G = reference.kfac_factors(net, task[2])
        for l, (a, g) in enumerate(blocks.values()):
            assert_close(a[m], A[l])
            assert_close(g[m], G[l])


def test_drawn_labels_approach_exact_ones():
    """The mean of many factors with labels drawn from the model approaches that with the expectation over labels,
    and not the empirical Fisher of the data's labels."""
    net, theta, tasks, batch = tiny(5, tasks=1)
    exact = boml.fisher_blocks(boml.spread(theta, 1), batch[2], torch.zeros(batch[3].shape), True, boml.tanh_network)
    u = torch.rand(4000, batch[2].shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.double)
    many = boml.fisher_blocks(boml.spread(theta, 4000), batch[2].expand(4000, -1, -1), u, False, boml.tanh_network)
    for name in exact:
        G, mean, sd = exact[name][1][0], many[name][1].mean(0), many[name][1].std(0)
        assert ((mean - G).abs() <= 5 * sd / 4000**0.5 + 1e-12).all(), name
    empirical = [np.outer(g, g) for x, y in zip(tasks[0][2], tasks[0][3]) for g in [reference.gradient(net, x, y)]]
    s = reference.blocks(net)[1]
    A, G = exact["linear1"]
    assert abs(np.mean(empirical, 0)[s, s] - dense((A, G))).max() > 0.05


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
    _, grads = boml.meta_gradient(theta, batch, 0.4, steps, support_weight, boml.tanh_network)
    mine = dict(zip(theta, grads))
    flat = [boml.to_matrix(mine, name).detach().numpy().flatten(order="F") / 2 for name in boml.layers_of(theta)]
    assert_close(np.concatenate(flat), reference.meta_gradient(net, tasks, 0.4, steps, support_weight))


@given(seeds, st.integers(1, 3))
def test_adaptation_jacobian_equals_reference(seed, steps):
    """The Jacobian of boml's adaptation, by autograd, is the reference's product of I - alpha H."""
    net, theta, tasks, batch = tiny(seed, tasks=1)
    p = boml.spread(theta, 1)
    adapted, _ = boml.adapt(p, batch[0], batch[1], 0.4, steps, True, boml.tanh_network)
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


@given(seeds, st.integers(1, 4), st.sampled_from([0.0, 0.4, 1.0, 5.0]), st.booleans())
def test_averages_is_positive_semidefinite(seed, n, a, exact_labels):
    """`averages` gives a positive semi-definite block for any draw and any rate."""
    _, theta, _, batch = tiny(seed, tasks=n, weight=2.0)
    g = torch.Generator().manual_seed(seed)
    draws = [torch.rand(y.shape, generator=g, dtype=torch.double) for y in batch[1::2]]
    cfg = toy_config(exact_labels=exact_labels)
    blocks = boml.adapted_curvature(theta, [(*batch, *draws)], 0.4, 1, a, cfg, boml.tanh_network)
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


@given(seeds, st.sampled_from(["averages", "products"]))
def test_support_hessian_is_added(seed, averaging):
    """With support_hessian the block grows by the mean A (x) mean G of the support sets at theta."""
    net, theta, tasks, batch = tiny(seed)
    A, G = (np.mean(f, 0) for f in zip(*[[f[1] for f in reference.kfac_factors(net, t[0])] for t in tasks]))
    plain, more = (curvature(theta, batch, 0.4, 1, 0.4, averaging, support_hessian=h)["linear1"] for h in (False, True))
    assert_close(dense(more) - dense(plain), np.kron(A, G), atol=1e-10)


@given(seeds, st.integers(1, 2))
def test_conv_at_one_location_equals_linear(seed, tasks):
    """On 1x1 images a conv's factors are the linear layer's on the one patch, the image at its centre."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, tasks * 2, 1, 1, generator=g, dtype=torch.double)
    A = boml.input_factor("conv1", x, tasks).unflatten(1, (2, 9)).unflatten(3, (2, 9))
    linear = boml.input_factor("linear", x.view(4, tasks, 2).transpose(0, 1), tasks)[:, :-1, :-1]
    assert_close(A[:, :, 4, :, 4], linear)
    assert_close(A.abs().sum(), linear.abs().sum())  # and nothing elsewhere
    flat = x.view(4, tasks, 2).transpose(0, 1)
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
    """Batch norm's block is the mean over images of the outer product of the gradient in that image's scale and shift."""
    g = torch.Generator().manual_seed(seed)
    x, signal = (torch.randn(4, tasks * 3, 2, 2, generator=g, dtype=torch.double) for _ in range(2))
    block = boml.output_factor("norm1", x, signal, tasks)
    normal = F.batch_norm(x, None, None, training=True)
    for m in range(tasks):
        for c in range(3):
            brute = 0.0
            for b in range(4):  # a scale and shift of this image alone
                own = torch.tensor([1.0, 0.0], dtype=torch.double, requires_grad=True)
                out = own[0] * normal[b, m * 3 + c] + own[1]
                (v,) = torch.autograd.grad(out, own, signal[b, m * 3 + c])
                brute = brute + torch.outer(v, v) / 4
            assert_close(block[m, c], brute)


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
    blocks = boml.adapted_curvature(theta, [batch], 0.4, 2, 0.4, toy_config())
    assert list(blocks) == boml.layers_of(theta)
    for name, block in blocks.items():
        assert boml.times(block, boml.to_matrix(theta, name)).shape == boml.to_matrix(theta, name).shape
        eigenvalues = np.linalg.eigvalsh(dense(block))
        assert np.isfinite(eigenvalues).all() and eigenvalues[0] > -1e-9 * eigenvalues[-1]


@given(seeds)
def test_matrix_and_back(seed):
    """A layer's matrix holds all of its parameters and nothing else."""
    theta, _ = toy_batch(seed)
    back = {}
    for name in boml.layers_of(theta):
        back |= boml.to_params(boml.to_matrix(theta, name), name, theta)
    assert list(back) == list(theta) and all(torch.equal(back[n], theta[n]) for n in theta)


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
    for got, t, m, L in zip(flat(dict(zip(theta, grads))), flat(theta), flat(mean), precision):
        assert_close(got, L @ (t - m))


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
    for name in posterior.blocks:
        expected = 7.0 * (dense(single[0][name]) + dense(single[1][name]))
        assert_close(dense(posterior.blocks[name]), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(posterior.mean[n], thetas[1][n]) for n in thetas[1])


@given(seeds, st.integers(1, 3))
def test_merge_is_exact_when_its_rank_suffices(seed, pairs):
    """Pairs that are multiples and copies of few merge into those few without loss."""
    A, G = random_block(seed, pairs, psd=True)
    twice = (torch.cat([A, 2 * A]), torch.cat([G, 3 * G]))
    merged = boml.merge(twice, pairs)
    assert len(merged[0]) == pairs
    assert_close(dense(merged), 7 * dense((A, G)), rtol=1e-8, atol=1e-9)


@given(seeds, st.integers(2, 4))
def test_merge_to_one_pair(seed, pairs):
    """One pair of a positive semi-definite sum has symmetric positive semi-definite factors and is nearer to the sum
    than any multiple of any of the given pairs."""
    block = random_block(seed, pairs, psd=True)
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


# ------------------------------------------------------------------------------------------------- Variational


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
    local = torch.stack([boml.noisy_layer(variance, [g] * 2)(mean, name, x) for _ in range(many)])
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
    for kind in ("conv", "linear"):
        name, x, mean, variance = layer_problem(kind, seed)
        zero = {n: torch.zeros_like(v) for n, v in variance.items()}
        assert_close(boml.noisy_layer(zero, [None] * 2)(mean, name, x), boml.layer(mean, name, x), atol=1e-12)
        g = lambda: torch.Generator().manual_seed(seed)
        a = boml.noisy_layer(variance, [g()] * 2)(mean, name, x) - boml.layer(mean, name, x)
        b = boml.noisy_layer({n: 4 * v for n, v in variance.items()}, [g()] * 2)(mean, name, x) - boml.layer(mean, name, x)
        assert_close(b, 2 * a, rtol=1e-7, atol=1e-9)


def variational(theta, logvar, **changes):
    posterior = boml.Variational(toy_config(**changes), theta)
    for v in posterior.extra.values():
        v.data.fill_(logvar)
    return posterior


@given(seeds, st.integers(1, 3))
def test_no_variance_is_maml(seed, steps):
    """As sigma goes to zero the objective and its gradient are those of the deterministic network."""
    theta, batch = toy_batch(seed)
    loss, grads = variational(theta, -200.0).gradient(theta, batch, 0.4, steps, [torch.Generator().manual_seed(seed)] * len(batch[0]))
    expected, expected_grads = boml.meta_gradient(theta, batch, 0.4, steps, 1.0)
    assert_close(loss, expected, rtol=1e-8)
    for g, e in zip(grads, expected_grads):
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


@given(seeds)
def test_penalty_is_the_kl_to_the_prior(seed):
    """The penalty is kl_weight times the KL from the posterior to the prior, zero just after absorbing."""
    theta, _ = toy_batch(seed)
    posterior = variational(theta, -3.0, kl_weight="0.5", first_variance=2.0)
    flat = torch.cat([v.detach().flatten() for v in theta.values()]).numpy()
    expected = 0.5 * reference.gaussian_kl(flat, np.exp(-3.0) * np.eye(len(flat)), 0 * flat, 2.0 * np.eye(len(flat)))
    assert_close(posterior.penalty(theta)[0], expected)
    posterior.absorb(theta, None, None)
    value, grads = posterior.penalty(theta)
    assert_close(value, 0.0)
    assert all(g.abs().max() < 1e-12 for g in grads)


def test_estimator_is_unbiased():
    """On a tiny network many samples approach the brute-force average over sampled weights."""
    _, theta, _, (x, y, _, _) = tiny(3, tasks=1, weight=0.3)
    g = torch.Generator().manual_seed(0)
    p, many = {n: v.detach() for n, v in theta.items()}, 20000
    wide = {n: v.expand(many, *v.shape) for n, v in p.items()}
    variance = {n: torch.full_like(v, 0.3) for n, v in wide.items()}
    x, y = x.expand(many, -1, -1), y.expand(many, -1)
    local = boml.cross_entropy(boml.tanh_network(wide, x, boml.noisy_layer(variance, [g] * many)), y)
    drawn = {n: v + 0.3**0.5 * torch.randn(v.shape, generator=g, dtype=torch.double) for n, v in wide.items()}
    brute = boml.cross_entropy(boml.tanh_network(drawn, x), y)
    at_mean = boml.cross_entropy(boml.tanh_network(wide, x), y)[0]
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
    start = {n: v.detach().clone() for n, v in posterior.extra.items()}

    def at(e):
        for n, v in posterior.extra.items():
            v.data.copy_(start[n] + e * direction[n])
        return posterior.gradient(theta, batch, 0.4, steps, [torch.Generator().manual_seed(seed)] * len(batch[0]))

    slope = sum((a * b).sum() for a, b in zip(at(0.0)[1][len(theta):], direction.values()))
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
        return posterior.gradient(moved, batch, 0.4, steps, [torch.Generator().manual_seed(seed)] * len(batch[0]))

    slope = sum((a * b).sum() for a, b in zip(at(0.0)[1], direction.values()))
    assert_close(slope, (at(1e-9)[0] - at(-1e-9)[0]) / 2e-9, rtol=1e-4, atol=1e-4)


def test_scores_of_made_up_predictions():
    """Accuracy, likelihood, its interval over tasks and the calibration error are those of the definition."""
    right = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    sure = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.3, 0.3, 0.3, 0.3]])
    got = boml.scores(torch.stack([right, torch.full_like(right, 0.7), sure]).double())
    assert_close([got["accuracy"], got["nll"], got["tasks"]], [0.5, 0.7, 2.0], rtol=1e-6)
    assert_close(got["ci95"], 1.96 * np.std([0.75, 0.25], ddof=1) / 2**0.5)
    assert_close(got["ece"], (4 * 0.15 + 4 * 0.05) / 8, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ Data, tasks


@given(seeds, st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 4]))
def test_sampled_tasks(seed, way, shot, query, turns):
    """Classes of a task are distinct, their images are theirs, distinct, and from the asked split."""
    data, cfg = toy_data(seed, turns=turns), toy_config(way=way, shot=shot, query=query)
    index = boml.sample_tasks(data, "val", 6, cfg, torch.Generator().manual_seed(seed))
    assert index.shape == (6, way, shot + query)
    turn, image = index // len(data.images), index % len(data.images)
    owner = torch.repeat_interleave(torch.arange(len(data.count)), data.count)[image]
    assert (owner == owner[..., :1]).all() and (turn == turn[..., :1]).all()
    assert set(owner.unique().tolist()) <= set(data.splits["val"].tolist())
    for t in range(6):
        classes = {(int(o), int(r)) for o, r in zip(owner[t, :, 0], turn[t, :, 0])}
        assert len(classes) == way and len(index[t].unique()) == way * (shot + query)


def test_sampling_is_uniform():
    """Over many tasks every class takes every label, and every image every place, about equally often."""
    data, cfg = toy_data(3, classes=9, least=4, most=6), toy_config(way=3, shot=1, query=1)
    index = boml.sample_tasks(data, "train", 20000, cfg, torch.Generator().manual_seed(0))
    owner = torch.repeat_interleave(torch.arange(9), data.count)[index]  # (20000, 3, 2)
    by_label = torch.stack([torch.bincount(owner[:, n, 0], minlength=3) for n in range(3)]) / 20000
    assert (by_label - 1 / 3).abs().max() < 0.02  # six standard deviations
    for c in range(3):
        mine = index[owner == c] - data.first[c]
        share = torch.bincount(mine, minlength=int(data.count[c])) / len(mine)
        assert (share - 1 / data.count[c]).abs().max() < 0.02


@given(seeds, st.sampled_from([1, 3]))
def test_fetched_images(seed, channels):
    """Images come scaled to [0, 1], turned as their class says, expanded to the channels, labels in class order."""
    data, cfg = toy_data(seed, turns=4), toy_config(way=2, shot=1, query=2, channels=channels)
    index = boml.sample_tasks(data, "train", 3, cfg, torch.Generator().manual_seed(seed))
    x_s, y_s, x_q, y_q = boml.fetch(data, index, cfg)
    assert x_s.shape == (3, 2, channels, 28, 28) and x_q.shape == (3, 4, channels, 28, 28)
    assert y_s.tolist() == [[0, 1]] * 3 and y_q.tolist() == [[0, 0, 1, 1]] * 3
    i = int(index[1, 1, 2])
    image = data.images[i % len(data.images), 0].double().numpy()
    image = np.rot90((image - image.min()) / (image.max() - image.min()), i // len(data.images))
    for channel in x_q[1, 3]:
        assert_close(channel.double(), image.copy(), rtol=1e-6, atol=1e-6)


SPLITS = {"omniglot": (1100, 100, 423), "mini_quickdraw": (241, 52, 52), "cifar_fs": (64, 16, 20),
          "mini_imagenet": (64, 16, 20), "vgg_flowers": (66, 16, 20), "aircraft": (64, 16, 20)}  # the paper's


@pytest.mark.parametrize("name", SPLITS)
def test_split_is_disjoint(name):
    """Training, validation and test classes have the paper's counts and share none, in whatever order they come."""
    names = [f"class {c}" for c in range(sum(SPLITS[name]))]
    if name in boml.SPLITS:
        names[64:] = " ".join(boml.SPLITS[name]).split()
    parts = boml.split_classes(name, names, SPLITS[name])
    assert tuple(len(set(parts[s])) for s in ("train", "val", "test")) == SPLITS[name]
    assert len(set().union(*parts.values())) == len(names)
    again = boml.split_classes(name, names[::-1], SPLITS[name])
    assert {names[::-1][c] for c in again["test"]} == {names[c] for c in parts["test"]}


@pytest.mark.parametrize("name", data_prep.DRAW)
def test_drawn_images_vary(name):
    """A generated dataset repeats itself for a seed, and its drawings of a class differ yet resemble each other more."""
    draw = lambda: list(data_prep.DRAW[name](np.random.default_rng(1), 6, 8))
    pictures, labels = zip(*draw())
    assert all((a == b).all() for a, (b, _) in zip(pictures, draw()))
    x = np.stack(pictures).reshape(len(labels), -1).astype(float)
    apart = np.linalg.norm(x[:, None] - x[None], axis=-1)
    same = np.equal.outer(labels, labels)
    assert (apart[~np.eye(len(x), dtype=bool)] > 0).all()
    assert apart[same & ~np.eye(len(x), dtype=bool)].mean() < apart[~same].mean()


# ------------------------------------------------------------------------------------------------------- Runs


def test_plan_of_everything_is_even():
    """Train-On-Everything gives each dataset so far its equal share over the iterations."""
    tasks = boml.Tasks("all", [toy_data()] * 3, toy_config(meta_batch=4), 0, [])
    total = np.sum([tasks.plan(2, i) for i in range(30)], 0)
    assert total.tolist() == [40, 40, 40]


@pytest.mark.parametrize("longer, expected", [(True, [3, 7, 9]), (False, [3, 4, 2])])
def test_iterations_of_everything(longer, expected):
    """Train-On-Everything trains for the newest dataset's iterations, or for those of all datasets so far."""
    sequence = [toy_data(iterations=n) for n in (3, 4, 2)]
    tasks = boml.Tasks("all", sequence, toy_config(toe_longer=longer), 0, [])
    assert [tasks.iterations(t) for t in range(3)] == expected


@given(seeds, st.integers(2, 5))
def test_task_sequence_shares_no_character(seed, way):
    """The tasks of the Omniglot sequence are of one alphabet each, have no character in common, and none that is
    evaluated on."""
    data = toy_data(seed, classes=65)._replace(kind="generated")  # 13 alphabets of 5, for alphabets of any name
    sequence, judge = boml.task_sequence(data, toy_config(way=way), seed)
    letters = [c for task in sequence for c in task.splits["train"].tolist()]
    unseen = judge.splits["val"].tolist() + judge.splits["test"].tolist()
    assert len(sequence) == (13 - len(unseen) // 5) * (5 // way) and len(letters) == len(sequence) * way
    assert len(set(letters)) == len(letters) and not set(letters) & set(unseen)
    assert all(len({data.names[c].split("/")[0] for c in task.splits["train"].tolist()}) == 1 for task in sequence)


@given(seeds)
def test_unseen_alphabets_are_not_mixed(seed):
    """The characters of a task to evaluate on are distinct and of one alphabet."""
    data = toy_data(seed, classes=65)._replace(kind="generated")
    _, judge = boml.task_sequence(data, toy_config(), seed)
    index = boml.sample_tasks(judge, "test", 20, toy_config(way=4), boml.stream("cpu", seed))
    c = torch.searchsorted(judge.first, index[..., 0].contiguous(), right=True) - 1  # the class of each image
    assert (c // 5 == c[:, :1] // 5).all() and all(len(set(task)) == 4 for task in c.tolist())


def test_buffer_is_sampled_uniformly():
    """Follow-The-Meta-Leader draws its tasks from all that have arrived, each about equally often, and no others."""
    tasks = boml.Tasks("buffer", [toy_data(0, iterations=4), toy_data(1)], toy_config(meta_batch=5), 0, [])
    for t, i in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0)):
        tasks.batch(t, i)
    tasks.arrive = lambda *_: None  # what has arrived stays; the rest of the second dataset's buffer is still zeros
    seen = {tuple(row.flatten().tolist()): 0 for b in (tasks.buffer[0], tasks.buffer[1][:5]) for row in b}
    for seed in range(400):
        tasks.seed = seed
        for _, index in tasks.batch(1, 0):
            for row in index:
                seen[tuple(row.flatten().tolist())] += 1
    counts = np.array(list(seen.values()))
    assert len(counts) == 25 and counts.sum() == 2000 and abs(counts / 2000 - 1 / 25).max() < 0.025


@pytest.mark.parametrize("method", boml.METHODS)
def test_training_step_on_meta_device(method):
    """No tensor of a training step strays to the CPU and nothing in it waits for a value: it runs without values."""
    cfg = toy_config(meta_batch=3)
    sequence = [toy_data(0, turns=4, device="meta"), toy_data(1, channels=3, device="meta")]
    theta = boml.leaves(boml.init_params(cfg, None, "meta"))
    posterior = boml.METHODS[method].posterior(cfg, theta)
    optimiser = boml.new_optimiser(theta, posterior, cfg)
    tasks = boml.Tasks(boml.METHODS[method].data, sequence, cfg, 0, [])
    for t in range(2):
        loss = boml.meta_step(theta, posterior, optimiser, tasks.batch(t, 0), cfg, lambda m: None)
        assert loss.is_meta and all(p.grad.is_meta for p in theta.values())


@pytest.fixture(scope="module")
def fake_data(tmp_path_factory):
    """Files in the shape of the three real datasets, with noise for images."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    cifar = " ".join(boml.SPLITS["cifar_fs"]).split() + [f"c{i}" for i in range(64)]
    alphabets = " ".join(boml.ALPHABETS).split() + [f"alphabet {i}" for i in range(35)]
    for name, names, shape in (
        ("omniglot", [f"{alphabets[i % 50]}/{i}" for i in range(1623)], (28, 28)),
        ("mini_quickdraw", [f"{i}" for i in range(345)], (28, 28)),
        ("cifar_fs", cifar, (28, 28, 3)),
    ):
        labels = np.repeat(np.arange(len(names)), 3)
        images = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=labels, names=names, origin=["made up", "none"])
    return folder


SMALL = ("--filters 4 --iterations 4 --meta-batch 2 --query 2 --eval-tasks 3 --eval-every 2 --hessian-tasks 3 "
         "--mc-samples 2").split()


def command(*args, program="boml.py"):
    line = [sys.executable, str(HERE / program), *map(str, args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def work_here(*args):
    """The runs of a command line, in this process, which spares their start."""
    args, cfg = boml.parse([str(a) for a in args])
    for method in args.methods:
        said = queue.SimpleQueue()
        boml.work(args, cfg, method, int(args.seeds[0]), said)
        assert [said.get() for _ in range(said.qsize())][-1][1:] == (1.0, "")


def rows_of(path):
    """The record without its times."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


def test_every_method_end_to_end(fake_data, tmp_path):
    """The command line takes every method through the triathlon and reports it; twice, with the same numbers."""
    line = ["triathlon", "--data", fake_data, *SMALL, "--out"]
    code, text, errors = command(*line, tmp_path / "a")
    assert code == 0, errors
    assert "REAL data" in text and all(m.label in text for m in boml.METHODS.values())
    work_here(*line, tmp_path / "b", "--methods", "bomvi")
    folder = tmp_path / "a" / "triathlon"
    for method in boml.METHODS:
        rows = rows_of(folder / f"{method}-0" / "record.jsonl")
        if method == "bomvi":  # which draws the most
            assert rows == rows_of(tmp_path / "b" / "triathlon" / f"{method}-0" / "record.jsonl")
        evaluations = 2 + 4 + 6 if method == "toe" else 2 + 2 + 2  # of the stages; Train-On-Everything's grow longer
        assert len(rows) == evaluations * 3
        assert {"experiment", "method", "seed", "schedule", "data", "stage", "iteration", "evaluated", "accuracy", "ci95",
                "nll", "tasks"} <= set(rows[0])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["data"] == "real" and set(summary["methods"]) == set(boml.METHODS)
    assert np.array(summary["methods"]["toe"]["accuracy"]).shape == (3, 3)
    assert summary["methods"]["bomvi"]["variance"].keys() == {"conv1", "conv2", "conv3", "conv4"}
    assert all(Image.open(folder / f"{name}.png").size[0] > 500 for name in ("accuracy", "covariance"))
    assert not boml.read_records(folder, dict(settings="others")) and len(boml.read_records(folder)) == 5  # of one table


def test_generated_data_is_labelled(tmp_path, capsys):
    """Where no data is there, a generated dataset runs under its own name, labelled in table, record and summary."""
    args = "--methods maml --filters 4 --iterations 1 --meta-batch 1 --query 2 --eval-tasks 2".split()
    boml.main(["run", "--sequence", "aircraft", "--data", str(tmp_path / "none"), "--out", str(tmp_path), *args])
    text = capsys.readouterr().out
    assert "GENERATED data" in text and "aircraft" not in text
    rows = rows_of(tmp_path / "run" / "maml-0" / "record.jsonl")
    assert {r["data"] for r in rows} == {"generated"}
    assert {r["evaluated"] for r in rows} == {"generated_aeroplanes"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"] == "generated"


def facts(method):
    return dict(experiment="triathlon", method=method, seed=0, schedule="cpu", data="real")


@pytest.mark.parametrize("method", boml.METHODS)
def test_resumed_run_equals_unbroken(method, tmp_path):
    """A run broken off after a checkpoint and resumed leaves the same record as one that was not."""
    cfg = toy_config(eval_every=2)
    sequence = [toy_data(0, iterations=2), toy_data(1, name="mini_quickdraw", iterations=4),
                toy_data(2, channels=3, name="cifar_fs")]
    go = lambda out, tell: boml.run(cfg, facts(method), sequence, sequence, tmp_path / out, tell)
    go("whole", lambda *_: None)

    def stop(share, text):
        if "mini_quickdraw 3/" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go("broken", stop)
    with open(tmp_path / "broken" / "record.jsonl", "a") as record:
        record.write("a row that came after the checkpoint\n")
    go("broken", lambda *_: None)
    assert rows_of(tmp_path / "broken" / "record.jsonl") == rows_of(tmp_path / "whole" / "record.jsonl")
    a, b = (torch.load(tmp_path / out / "checkpoint.pt", weights_only=True) for out in ("broken", "whole"))
    assert all(torch.equal(a["theta"][n], b["theta"][n]) for n in a["theta"])


def toy_run(out, method, cfg=None, tell=lambda *_: None, **more):
    sequence = [toy_data(0, iterations=6), toy_data(1, name="mini_quickdraw", iterations=8)]
    boml.run(cfg or toy_config(eval_every=4), facts(method), sequence, sequence, out, tell, **more)


def assert_same_run(a, b):
    """The same record but for its times, and the same final state, bit by bit."""
    assert rows_of(a / "record.jsonl") == rows_of(b / "record.jsonl")
    states = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (a, b)]
    flat = lambda x: [y for v in (x.values() if isinstance(x, dict) else x) for y in flat(v)] if isinstance(
        x, (dict, list, tuple)) else [x]
    for key in ("theta", "posterior", "buffer", "optimiser"):
        one, two = (flat(state[key]) for state in states)
        assert len(one) == len(two), key
        assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, two)), key


@pytest.mark.parametrize("method", boml.METHODS)
def test_run_killed_again_and_again_equals_unbroken(method, tmp_path, monkeypatch):
    """A run killed without warning at twenty random moments, and resumed each time, ends as one that was not."""
    monkeypatch.setattr(boml, "CHECKPOINT_EVERY", 1)
    start = time.time()
    toy_run(tmp_path / "whole", method)
    wait, rng, kills, ended = (time.time() - start) / 3, np.random.default_rng(0), 0, False
    while kills < 20 or not ended:
        if ended:  # before the twentieth kill: once more from the start
            assert_same_run(tmp_path / "killed", tmp_path / "whole")
            shutil.rmtree(tmp_path / "killed")
        pid = os.fork()
        if not pid:
            try:
                toy_run(tmp_path / "killed", method)
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


@pytest.mark.parametrize("method", boml.METHODS)
def test_stopped_run_equals_unbroken(method, tmp_path):
    """A run asked to stop finishes its iteration and writes a checkpoint; resumed again and again, it ends the same."""
    toy_run(tmp_path / "whole", method)
    asked = np.random.default_rng(1)
    for _ in range(60):
        steps = []
        toy_run(tmp_path / "stopped", method, tell=lambda *_: steps.append(asked.random() < 0.4) or steps[-1])
        if not any(steps):
            break
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_everything_is_evaluated_when_maml_would_end(tmp_path):
    """Train-On-Everything, where it trains longer, is also evaluated after as many iterations as sequential MAML has."""
    toy_run(tmp_path, "toe", toy_config(toe_longer=True))
    assert {(r["stage"], r["iteration"]) for r in rows_of(tmp_path / "record.jsonl")} == {(1, 6), (2, 8), (2, 14)}


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A folder with a run, and the same one stopped in the middle."""
    out = tmp_path_factory.mktemp("run")
    toy_run(out / "whole", "maml")
    toy_run(out / "stopped", "maml", tell=lambda share, text: "mini_quickdraw 5/" in text)
    return out


@settings(max_examples=10)
@given(part=st.floats(0, 0.999), flip=st.booleans())
def test_damaged_checkpoint_falls_back(part, flip, halfway):
    """A checkpoint cut off anywhere, or with a byte changed, is left for the one before it, and the run ends the same."""
    broken = Path(tempfile.mkdtemp(dir=halfway)) / "broken"
    shutil.copytree(halfway / "stopped", broken)
    path = broken / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    at = int(part * len(content))
    if flip:
        content[at] ^= 255
    path.write_bytes(content if flip else content[:at])
    toy_run(broken, "maml")
    assert_same_run(broken, halfway / "whole")


def test_write_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A full disk in the middle of a checkpoint loses nothing: the run resumes from the one before, and ends the same."""
    toy_run(tmp_path / "whole", "ftml")
    real_save, calls = torch.save, []

    def save(state, file):
        calls.append(1)
        if len(calls) == 3:
            file.write(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        real_save(state, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="No space"):
        toy_run(tmp_path / "full", "ftml")
    toy_run(tmp_path / "full", "ftml")
    assert_same_run(tmp_path / "full", tmp_path / "whole")


def test_second_process_is_refused(tmp_path):
    """While a run is at work in its folder, no other starts there."""
    held = boml.lock(tmp_path)
    with pytest.raises(boml.Problem, match="another process is at work"):
        toy_run(tmp_path, "maml")
    held.close()
    toy_run(tmp_path, "maml")


def test_processes_share_the_work(fake_data, tmp_path):
    """Two processes of torchrun come to the numbers of one, for every method, in float64."""
    program = tmp_path / "double.py"
    program.write_text(f"import sys, torch; sys.path.insert(0, {str(HERE)!r})\n"
                       "torch.set_default_dtype(torch.double)\nimport boml; boml.main(sys.argv[1:])\n")
    args = ["run", "--sequence", "omniglot,cifar_fs", "--data", fake_data, *SMALL, "--meta-batch", "3", "--iterations", "2",
            "--hessian-tasks", "20", "--out"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, *args, tmp_path / "2"]
    done = subprocess.run([str(x) for x in line], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    torch.set_default_dtype(torch.double)
    try:
        work_here(*args, tmp_path / "1")
    finally:
        torch.set_default_dtype(torch.float)
    for method in boml.METHODS:
        one, two = (torch.load(tmp_path / str(n) / f"run/{method}-0/checkpoint.pt", weights_only=True) for n in (1, 2))
        for name, value in one["theta"].items():
            assert value.dtype == torch.double
            assert_close(two["theta"][name], value, rtol=1e-9, atol=1e-9)
        rows = [rows_of(tmp_path / str(n) / f"run/{method}-0/record.jsonl") for n in (1, 2)]
        assert len(rows[0]) == len(rows[1])
        for a, b in zip(*rows):
            assert_close(b["nll"], a["nll"])


def test_fresh_start_waits_for_the_lock(tmp_path):
    """--fresh takes nothing from a run that is at work, and starts a finished one over."""
    toy_run(tmp_path, "maml")
    held = boml.lock(tmp_path)
    before = (tmp_path / "record.jsonl").read_text()
    with pytest.raises(boml.Problem, match="another process"):
        toy_run(tmp_path, "maml", fresh=True)
    assert (tmp_path / "record.jsonl").read_text() == before and (tmp_path / "checkpoint.pt").exists()
    held.close()
    done = []
    toy_run(tmp_path, "maml", tell=lambda share, text: done.append(text) and False, fresh=True)
    assert len(done) > 10 and len(rows_of(tmp_path / "record.jsonl")) == before.count("\n")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_with_a_checkpoint(number, code, fake_data, tmp_path):
    """SIGTERM and Ctrl-C end the command with their status, a checkpoint of every run, and how to go on."""
    args = [*SMALL, "--iterations", "1000", "--eval-every", "1000", "--methods", "maml,bomla", "--jobs", "2"]
    line = [sys.executable, HERE / "boml.py", "triathlon", "--data", fake_data, "--out", tmp_path, *args]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    for line in process.stderr:
        if "maml-0 omniglot" in line or "bomla-0 omniglot" in line:
            break
    while len(list(tmp_path.glob("triathlon/*/lock"))) < 2:
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "the same command, without --fresh, goes on from here" in errors
    for method in ("maml", "bomla"):
        state = torch.load(tmp_path / f"triathlon/{method}-0/checkpoint.pt", weights_only=True)
        assert 0 < state["iteration"] < 1000


@pytest.mark.parametrize("where", ["loss", "curvature"])
def test_values_that_are_not_finite_stop_the_run(where, tmp_path, monkeypatch):
    """A loss or a curvature that is not finite ends the run in a sentence with the dataset and the last good state."""
    real_step, real_curvature = boml.meta_step, boml.adapted_curvature
    if where == "loss":
        monkeypatch.setattr(boml, "meta_step", lambda *a: real_step(*a) * np.nan)
    else:
        monkeypatch.setattr(boml, "adapted_curvature", lambda *a: {
            n: tuple(f * np.nan for f in block) for n, block in real_curvature(*a).items()})
    with pytest.raises(boml.Problem, match="loss of bomla became nan on omniglot by iteration 4|curvature of omniglot is not"):
        toy_run(tmp_path, "bomla")


@given(seeds, st.integers(2, 5), st.integers(2, 5))
def test_extreme_eigenvalues(seed, P, O):
    """Power iteration finds the smallest and the largest eigenvalue of a symmetric sum of Kronecker products."""
    g = torch.Generator().manual_seed(seed)
    half = [torch.randn(2, n, n, generator=g, dtype=torch.double) for n in (P, O)]
    block = tuple(f + f.mT for f in half)
    low, high = boml.extremes(block, torch.randn(O, P, generator=g, dtype=torch.double), 1000)
    exact = np.linalg.eigvalsh(dense(block))
    assert_close([low, high], exact[[0, -1]], rtol=1e-2, atol=1e-2 * abs(exact).max())


def test_indefinite_precision_is_made_definite(capsys):
    """A precision with a negative eigenvalue is reported, and gets the multiple of the identity that it lacks and 1e-4 of
    its largest eigenvalue more."""
    cfg, eye = toy_config(), torch.eye(5, dtype=torch.double)[None]
    block = (eye, torch.diag(torch.tensor([-2.0, 1.0, 3.0, 0.5], dtype=torch.double))[None])
    posterior = boml.Laplace(cfg, {})
    made = posterior.definite("conv1", block, torch.rand(4, 5, dtype=torch.double), toy_data())
    assert_close(np.linalg.eigvalsh(dense(made))[[0, -1]], [3e-4, 5.0003], atol=1e-6)
    assert "conv1 after omniglot is not positive semi-definite" in capsys.readouterr().err


def made_up(method, seed, accuracies):
    """Rows of a run whose accuracy after stage t on dataset j is accuracies[t][j]."""
    names = [f"d{j}" for j in range(len(accuracies[0]))]
    facts = dict(experiment="triathlon", method=method, seed=seed, schedule="cpu", data="real", judges=names, stages=len(names))
    ends = dict(iteration=9, iterations=9, ci95=0.02, nll=1.0, tasks=10, seconds=1.0)
    return [facts | ends | dict(stage=t + 1, evaluated=name, accuracy=a)
            for t, row in enumerate(accuracies) for name, a in zip(names, row)]


def test_summary_of_made_up_records():
    """Means, intervals, forgetting (peak minus final) and learning (after the own stage) are those of the records."""
    accuracies = [[[0.8, 0.3], [0.6, 0.5]], [[0.9, 0.3], [0.5, 0.7]]]
    runs = {("maml", s): made_up("maml", s, accuracies[s]) for s in (0, 1)}
    maml = boml.summarise(runs)["methods"]["maml"]
    assert_close(maml["accuracy"], [[0.85, 0.3], [0.55, 0.6]])
    assert_close(maml["forgetting"]["d0"], 0.3)
    assert maml["learning"] == {"d0": 0.85, "d1": 0.6} and maml["seeds"] == [0, 1]
    assert_close(maml["final_average"], 0.575)
    assert_close(maml["ci95"][1][1], 12.71 * 0.1, rtol=1e-3)  # t with one degree of freedom, standard error 0.1


def test_unfinished_stage_does_not_count():
    """A seed in the middle of a stage enters no average until the stage is done."""
    runs = {("maml", s): made_up("maml", s, [[0.8, 0.3], [0.6, 0.5]]) for s in (0, 1)}
    for row in runs["maml", 1][2:]:
        row.update(iteration=5, accuracy=0.0)
    summary = boml.summarise(runs)
    assert summary["methods"]["maml"]["seeds"] == [0]
    assert_close(summary["methods"]["maml"]["accuracy"], [[0.8, 0.3], [0.6, 0.5]])
    assert "20.0" in boml.table(summary).split("\n")[2]  # forgotten, of the datasets before the last


def test_difference_to_maml_is_paired():
    """A method is compared with sequential MAML seed by seed: what both share cancels in the interval."""
    runs = {("maml", s): made_up("maml", s, [[0.8, 0.3], [0.5 + 0.1 * s, 0.5]]) for s in (0, 1, 2)}
    runs |= {("bomla", s): made_up("bomla", s, [[0.8, 0.3], [0.7 + 0.1 * s, 0.4]]) for s in (0, 1, 2)}
    got = boml.summarise(runs)["methods"]["bomla"]["versus_maml"]
    assert_close(got["d0"], [0.2, 0.0])
    assert_close(got["d1"], [-0.1, 0.0])


@pytest.mark.parametrize("drops, verdict", [
    ([0.30, 0.32, 0.28], "holds"), ([-0.10, -0.12, -0.11], "does not hold"), ([0.3, -0.3, 0.1], "cannot tell yet")])
def test_claim_comes_out_each_way(drops, verdict):
    """The verdict on a claim follows the effect and its interval over seeds: for it, against it, or neither."""
    runs = {("maml", s): made_up("maml", s, [[0.6, 0.3], [0.6 - d, 0.5]]) for s, d in enumerate(drops)}
    first, *others = boml.claims(boml.summarise(runs), runs)
    assert first["claim"] == "Sequential MAML forgets d0 by the end" and first["verdict"] == verdict
    assert_close(first["effect"], np.mean(drops), atol=1e-4)
    bomla = next(c for c in others if c["claim"].startswith("BomLA keeps more of d0"))
    assert bomla["verdict"] == "cannot tell yet" and bomla["missing"] == "needs bomla"  # and says what is missing
    assert all(c["claim"] in boml.claims_table([first, *others]) for c in [first, *others])


def test_seeds_that_would_tell():
    """Where one cannot tell, the verdict says which way the effect leans, and how many seeds its interval would take to
    leave the bound; of one or two seeds no number."""
    missing = lambda values, *bounds: boml.judge(values, [0.1] * len(values), *bounds)["missing"]
    assert missing([0.02, 0.04, 0.0], 0.0, 1.0) == "leans to hold: 7 seeds or more"  # 2.45 * 0.02 / sqrt(7) = 0.0185
    assert missing([-0.02, -0.04, 0.0], 0.0, 1.0) == "leans to fail: 7 seeds or more"
    assert missing([0.08, 0.06, 0.1], 0.0, 0.1) == "leans to hold: 7 seeds or more"  # near the upper bound
    assert missing([0.01, -0.01, 0.001], 0.0, 1.0) == "leans to hold: 31 seeds or more"
    assert missing([0.02], 0.0, 1.0) == missing([0.02, 0.03], 0.0, 1.0) == "leans to hold: more seeds"


def test_two_seeds_that_agree_are_not_certain():
    """The interval of two seeds is no narrower than that over their tasks."""
    assert_close(boml.interval([0.5, 0.5], [0.03, 0.04]), 0.025)


def test_claims_need_no_summary(tmp_path):
    """The verdicts, and the summary itself, come from the records alone."""
    for row in made_up("maml", 0, [[0.9, 0.3], [0.4, 0.5]]):
        folder = tmp_path / "triathlon" / "maml-0"
        folder.mkdir(parents=True, exist_ok=True)
        boml.add_row(folder, row)
    boml.show_claims(tmp_path)
    first = json.loads((tmp_path / "claims.json").read_text())["triathlon"][0]
    assert (first["claim"], first["verdict"]) == ("Sequential MAML forgets d0 by the end", "holds")


def test_claims_are_paired_over_seeds():
    """A claim that compares methods takes the difference seed by seed."""
    runs = {(m, s): made_up(m, s, [[0.9, 0.3], [0.4 + gain + 0.2 * s, 0.5]])
            for m, gain in (("maml", 0), ("bomla", 0.1)) for s in (0, 1, 2)}
    claim = next(c for c in boml.claims(boml.summarise(runs), runs) if c["claim"].startswith("BomLA keeps more"))
    assert (claim["effect"], claim["ci95"], claim["seeds"], claim["verdict"]) == (0.1, 0.0, 3, "holds")


def test_claims_of_a_task_sequence():
    """Along a sequence of tasks the last quarter is compared with the first."""
    rise = lambda m, s: [r | dict(stages=8, judges=["d0"], accuracy=0.5 + 0.05 * t + 0.001 * s)
                         for t, r in enumerate(made_up(m, s, [[0.0]] * 8))]
    runs = {(m, s): rise(m, s) for m in ("bomla", "toe") for s in (0, 1)}
    found = {c["claim"]: c for c in boml.claims(boml.summarise(runs), runs)}
    gathers = found["BomLA gathers few-shot ability along the sequence"]
    assert gathers["verdict"] == "holds" and gathers["effect"] == 0.3
    assert found["Train-On-Everything gains nothing from task to task"]["verdict"] == "does not hold"


def test_one_dataset_is_reported(tmp_path):
    """A sequence of one dataset has a table and a figure, and no claims."""
    sequence = [toy_data(0)]
    boml.run(toy_config(), facts("maml"), sequence, sequence, tmp_path / "maml-0", lambda *_: None)
    assert "omniglot" in boml.report(tmp_path) and (tmp_path / "accuracy.png").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["claims"] == []


def test_settings_know_the_images():
    """Runs on other images of the same name are runs of other settings."""
    cfg, data = toy_config(), toy_data(0)
    assert boml.digest(cfg, [data]) != boml.digest(cfg, [data._replace(mark="other")])


def readme_table(summary):
    """The lines of a summary's table in the README."""
    percent, names, lines = lambda v: f"{100 * v:.1f}", summary["datasets"], []
    for method, m in summary["methods"].items():
        if summary["stages"] == len(names):
            own = [f"{percent(m['learning'][n])} -> " if j < len(names) - 1 else "" for j, n in enumerate(names)]
            cells = [f"{o}{percent(a)} ± {percent(c)}" for o, a, c in zip(own, m["accuracy"][-1], m["ci95"][-1])]
            cells.append(percent(m["final_average"]))
        else:
            quarters = [summary["stages"] * q // 4 for q in (1, 2, 3, 4)]
            cells = [f"{percent(m['accuracy'][q - 1][0])} ± {percent(m['ci95'][q - 1][0])}" for q in quarters]
        lines.append(f"| {boml.method_of(method).label} | {len(m['seeds'])} | {' | '.join(cells)} |")
    return lines


def readme_claims(summary):
    """The lines of a summary's claims in the README."""
    lines = []
    for c in summary["claims"]:
        lines.append(f"| {c['section']} | {c['claim']} | {c['counts']} | {' | '.join(boml.claim_cells(c))} |")
    return lines


@pytest.mark.parametrize("path", sorted(re.findall(r"<!-- (figures/[\w/]+\.json) -->", (HERE / "README.md").read_text())))
def test_readme_says_what_was_measured(path):
    """The README's tables of results and claims are those of the summaries that are committed beside it."""
    readme, summary = (HERE / "README.md").read_text(), json.loads((HERE / path).read_text())
    section = readme.split(f"<!-- {path} -->")[1].split("<!--")[0]
    for line in readme_table(summary):
        assert line in section
    for line in readme_claims(summary) if "| verdict |" in section else ():
        assert line in section


@pytest.mark.parametrize("folder", sorted({path.parents[1] for path in HERE.glob("figures/*/*/record.jsonl")}), ids=lambda f: f.name)
def test_summaries_follow_from_the_records(folder, tmp_path):
    """The committed summary of an experiment is what its committed records give."""
    summary, runs = json.loads((folder / "summary.json").read_text()), boml.read_records(folder)
    again = boml.summarise(runs)
    boml.covariance(tmp_path, runs, again)
    assert (summary["methods"], summary["claims"]) == (again["methods"], boml.claims(again, runs))


def test_report_between_record_and_checkpoint(tmp_path):
    """A report that falls between a stage's last record and its checkpoint has the numbers, and no picture yet."""
    toy_run(tmp_path / "bomvi-0", "bomvi", tell=lambda share, text: not text)  # stopped after the first stage
    path = tmp_path / "bomvi-0" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["posterior"]["history"] = []
    torch.save(state, path)
    assert "after omniglot" in boml.report(tmp_path) and not (tmp_path / "covariance.png").exists()


def test_readme_counts_the_verdicts():
    """The README's count of verdicts is that of the committed claims."""
    rows = [c for rows in json.loads((HERE / "figures/claims.json").read_text()).values() for c in rows]
    holds, fails, none = (sum(c["verdict"] == v for c in rows) for v in ("holds", "does not hold", "cannot tell yet"))
    idle = sum("effect" not in c for c in rows)
    assert (f"Of {len(rows)} claims read in the paper, {holds} hold here, {fails} do not, {none - idle} cannot be told with these seeds, and "
            f"{idle} were not run") in " ".join((HERE / "README.md").read_text().split())


def test_readme_says_how_fast():
    """The README's table of speeds is that of the benchmark's record."""
    readme, rows = (HERE / "README.md").read_text(), json.loads((HERE / "figures/bench.json").read_text())["rows"]
    for name, v in rows.items():
        if "ratio" in v:
            assert (f"| {name} | {v['plain_seconds']:.2f} | {v['seconds']:.2f} | {v['ratio']:.2f} | {100 * v['peak_share']:.0f} % | "
                    f"{v['plain_mb']:.0f} | {v['mb']:.0f} |") in readme


def test_readme_says_how_good_the_approximation_is():
    """The README's table of the approximation is that of its record, merged to one pair."""
    readme, medians = (HERE / "README.md").read_text(), json.loads((HERE / "figures/approximation.json").read_text())["medians"]
    states = dict.fromkeys(key.split("|")[0] for key in medians)
    for form in boml.FORMS:
        cells = [[medians[f"{state}|{form}|one pair|layer {l}"] for l in (1, 2, 3)] for state in states]
        cells = [", ".join(f"{error:.2f}/{angle:.0f}" for error, angle in row) for row in cells]
        assert f"| {form} | {' | '.join(cells)} |" in readme


def test_readme_says_how_the_kl_weighs():
    """The README's table of KL weights is that of their record."""
    readme, record = (HERE / "README.md").read_text(), json.loads((HERE / "figures/bomvi_kl_weight.json").read_text())
    for weight, m in record["kl_weight"].items():
        percent, last = lambda v: f"{100 * v:.1f}", m["accuracy"][-1]
        own = [f"{percent(m['accuracy'][j][j])} -> {percent(last[j])}" for j in (0, 1)]
        assert re.search(rf"\| {weight}[^|]* \| {own[0]} \| {own[1]} \| {percent(last[2])} \| {percent(m['final_average'])} \|", readme)


def test_readme_adapts_to_new_images(tmp_path, monkeypatch):
    """The README's program for new images adapts as `fetch` and `adapt` do."""
    run = tmp_path / "runs/triathlon/bomla-0"
    run.mkdir(parents=True)
    torch.save(dict(theta=boml.init_params(toy_config(channels=3), torch.Generator())), run / "checkpoint.pt")
    own_folder(tmp_path / "labelled", 5), own_folder(tmp_path / "unlabelled", 1, each=7)
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)[1], space := {})
    theta, data = space["theta"], boml.load_dataset("labelled", tmp_path, cfg=toy_config())
    x_s, y_s, *_ = boml.fetch(data, torch.arange(20).view(1, 5, 4), toy_config(shot=4, query=0))
    expected, _ = boml.adapt(boml.leaves(boml.spread(theta, 1)), x_s, y_s, 0.1, 10)
    assert_close(space["adapted"]["linear.weight"], expected["linear.weight"], rtol=1e-5, atol=1e-6)
    assert boml.network(expected, space["x_q"]).shape == (1, 7, 5)


def test_readme_guides_to_the_right_lines():
    """The reading guide's lines are those of the sections."""
    source = (HERE / "boml.py").read_text().split("\n")
    heads = [n for n, line in enumerate(source, 1) if line.startswith("# -----")] + [len(source)]
    guide = (HERE / "README.md").read_text().split("## Reading")[1].split("\n## ")[0]
    for start, end in zip(heads, heads[1:]):
        assert f"\n| {source[start - 1].split('- ')[1]} | {start}-{end - 1} |" in guide


# -------------------------------------------------------------------------------------------------- Bad input


@pytest.mark.parametrize("args, word", [
    (["marathon"], "'marathon' is not an experiment"),
    (["triathlon", "--methods", "maml,reptile"], "'reptile' is not a method"),
    (["triathlon", "--sequence", "omniglot,mnist"], "'mnist' is neither a folder nor a dataset"),
    (["triathlon", "--seeds", "0,x"], "'x' is not a whole number"),
    (["triathlon", "--colour", "red"], "--colour"),
    (["triathlon", "--iterations", "many"], "--iterations: 'many' is not a whole number"),
    (["triathlon", "--iterations", "0"], "--iterations 0: it must be above 0"),
    (["triathlon", "--schedule", "gpu"], "gpu"),
    (["triathlon", "--split", "train"], "--split is 'train'"),
    (["triathlon", "--query", "15"], "use --query 2 or fewer"),
    (["triathlon", "--shot", "3"], "use --shot 2 or fewer"),
    (["triathlon", "--jobs", "-1"], "--jobs is -1"),
    (["triathlon", "--device", "abacus"], "--device abacus"),
    (["triathlon", "--methods", "maml,maml"], "names something twice"),
    (["triathlon", "--methods", "maml", "--past-weight", "1"], "--past-weight is BomLA's"),
    (["triathlon", "--inner-steps", "0"], "--inner-steps 0"),
    (["triathlon", "--inner-steps", "1.5"], "'1.5' is not a whole number"),
    (["triathlon", "--jacobian-rate", "abc"], "--jacobian-rate: 'abc' is not a number"),
    (["triathlon", "--kl-weight", "nan"], "--kl-weight is nan"),
    (["run"], "run needs --sequence"),
    (["triathlon", "--iterations", ","], "--iterations , has 0 values"),
    (["triathlon", "--device", "meta"], "--device meta computes nothing"),
    (["run", "--sequence", "omniglot,"], "'' is neither a folder nor a dataset"),
    (["triathlon", "--way", "21"], "cifar_fs has 20 of its 100 classes for test"),
    (["triathlon", "--past-weight", "1,x"], "--past-weight: 'x' is not a number"),
    (["triathlon", "--past-weight", "1,-1"], "--past-weight is 1,-1"),
    (["omniglot", "--sequence", "cifar_fs"], "omniglot takes --sequence omniglot"),
    (["triathlon", "--inner-rate", "fast"], "--inner-rate: 'fast' is not a number"),
    (["triathlon", "--inner-rate", "0.1,0.2"], "--inner-rate 0.1,0.2 has 2 values"),
])
def test_bad_command_line(args, word, fake_data):
    """A mistake on the command line is one sentence that names it."""
    with pytest.raises(boml.Problem) as problem:
        boml.main([*args[:1], "--data", str(fake_data), "--query", "2", *args[1:]])
    assert word in str(problem.value) and "\n" not in str(problem.value)


def test_values_per_dataset_are_checked_before_the_data():
    """A setting with a value for each dataset is refused when the command line is read, before anything is downloaded."""
    with pytest.raises(boml.Problem, match="has 2 values"):
        boml.parse(["triathlon", "--iterations", "3,4"])


def spoil(folder, fake_data, how):
    whole = (fake_data / "cifar_fs.npz").read_bytes()
    if how == "truncated":
        (folder / "cifar_fs.npz").write_bytes(whole[: len(whole) // 2])
    elif how == "missing key":
        np.savez(folder / "cifar_fs.npz", images=np.zeros((3, 28, 28), np.uint8))
    else:
        with np.load(fake_data / "cifar_fs.npz") as z:
            np.savez(folder / "cifar_fs.npz", **dict(z) | dict(images=z["images"].astype(np.float32)))


def test_merge_rank_beyond_the_factors():
    """A rank that the factors cannot have is cut to the one they can."""
    block = random_block(0, 4, P=5, O=1)
    assert_close(dense(boml.merge(block, 3)), dense(block), atol=1e-9)


def test_divergence_in_evaluation_is_reported():
    """An adaptation that runs away ends in a sentence that names the dataset."""
    data = toy_data(0)
    data = data._replace(setting=data.setting._replace(inner_rate=1e30, eval_steps=3))
    cfg = toy_config(channels=1)
    theta = boml.init_params(cfg, torch.Generator().manual_seed(0))
    with pytest.raises(boml.Problem, match="omniglot"):
        boml.evaluate(theta, boml.Point(cfg, theta), data, cfg, 0)


@pytest.mark.parametrize("how", ["truncated", "missing key", "not uint8"])
def test_bad_data_file(how, fake_data, tmp_path):
    """A file that is not what it should be is named."""
    spoil(tmp_path, fake_data, how)
    with pytest.raises(boml.Problem, match="cifar_fs.npz"):
        boml.load_dataset("cifar_fs", tmp_path)


def own_folder(path, classes, each=4):
    rng = np.random.default_rng(0)
    for c in range(classes):
        (path / f"class {c}").mkdir(parents=True)
        for i in range(each):
            picture = Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8))
            picture.convert("LRP"[c % 3] if c % 3 != 1 else "RGB").save(path / f"class {c}" / f"{i}.png")
    return path


def test_own_folder_joins_a_sequence(fake_data, tmp_path, capsys):
    """A folder of class folders is a dataset by its own name, also of pictures of several kinds."""
    own = own_folder(tmp_path / "my_images", 12)
    boml.main(["run", "--sequence", f"omniglot,{own}", "--methods", "maml", "--data", str(fake_data),
               "--out", str(tmp_path / "out"), *SMALL])
    text = capsys.readouterr().out
    assert "my_images (own): 5/2/5 classes, 48 images" in text and "REAL AND OWN data" in text
    assert {r["evaluated"] for r in rows_of(tmp_path / "out/run/maml-0/record.jsonl")} == {"omniglot", "my_images"}


@pytest.mark.parametrize("classes, spoil, word", [
    (3, None, "my_images has 0 of its 3 classes for train, too few for --way 5; use --way 2 or fewer, or give it 10 classes"),
    (12, lambda p: (p / "class 3" / "0.png").write_bytes(b"\x89PNG\r\n"), "class 3/0.png, which is not a readable image"),
    (12, lambda p: (p / "empty").mkdir(), "empty holds no images"),
    (0, lambda p: p.mkdir(), "holds no folders"),
])
def test_bad_own_folder(classes, spoil, word, tmp_path):
    """What is wrong with a person's own folder is said in a sentence."""
    own = own_folder(tmp_path / "my_images", classes)
    if spoil:
        spoil(own)
    with pytest.raises(boml.Problem, match=word):
        boml.main(["run", "--sequence", str(own), "--query", "2", "--out", str(tmp_path / "out")])


def test_two_folders_of_one_name(tmp_path):
    """Datasets that would have the same name in the table are refused."""
    folders = [str(own_folder(tmp_path / parent / "my_images", 12)) for parent in "ab"]
    with pytest.raises(boml.Problem, match="two of my_images, my_images have the same name"):
        boml.main(["run", "--sequence", ",".join(folders), "--query", "2", "--out", str(tmp_path / "out")])


def test_sixteen_bits_become_eight(tmp_path):
    """A picture of 16 bits per pixel keeps its shades."""
    (tmp_path / "a").mkdir()
    Image.fromarray(np.linspace(0, 65535, 28 * 28).reshape(28, 28).astype(np.uint16)).save(tmp_path / "a" / "1.png")
    images, _, _ = data_prep.read_folder(tmp_path, "L")
    assert abs(images[0].ravel() - np.linspace(0, 255, 28 * 28)).max() <= 1


def test_alphabets_smaller_than_a_task():
    """Alphabets with too few characters for a task are not evaluated on; if there is none, a sentence says so."""
    data = toy_data(0, classes=65)._replace(kind="generated")
    with pytest.raises(boml.Problem, match="no alphabets of 6 characters"):
        boml.task_sequence(data, toy_config(way=6), 0)


def test_lambda_study_side_by_side(fake_data, tmp_path):
    """Several values of lambda are runs of their own beside the default's, in one table."""
    work_here("run", "--sequence", "omniglot,cifar_fs", "--data", fake_data, "--out", tmp_path, *SMALL, "--iterations", "1",
              "--methods", "bomla,bomvi", "--past-weight", "1,100,1000")
    text = boml.report(tmp_path / "run")
    methods = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]
    assert list(methods) == ["bomla", "bomla@1", "bomla@1000", "bomvi"] and "BomLA, lambda = 1000" in text
    weights = {m: torch.load(tmp_path / f"run/{m}-0/checkpoint.pt", weights_only=True)["settings"]["past_weight"]
               for m in methods}
    assert weights == {"bomla": 100.0, "bomla@1": 1.0, "bomla@1000": 1000.0, "bomvi": 100.0}


def test_omniglot_sequence_end_to_end(fake_data, tmp_path):
    """The task sequence runs with every method, evaluates after every task, and draws its figure."""
    args = "--filters 4 --iterations 1 --tasks 4 --shot 1 --query 2 --eval-tasks 2 --eval-every 2".split()
    work_here("omniglot", "--data", fake_data, "--out", tmp_path, *args)
    text = boml.report(tmp_path / "omniglot")
    assert "after task 4" in text and all(m.label in text for m in boml.METHODS.values())
    for method in boml.METHODS:
        rows = rows_of(tmp_path / f"omniglot/{method}-0/record.jsonl")
        assert [r["stage"] for r in rows] == [1, 2, 3, 4] and {r["evaluated"] for r in rows} == {"unseen alphabets"}
    assert Image.open(tmp_path / "omniglot" / "accuracy.png").size[0] > 500


def test_problem_is_one_line_and_status_2(fake_data):
    """The person sees one sentence and no traceback; the exit status is 2."""
    code, text, errors = command("triathlon", "--methods", "reptile")
    assert code == 2 and errors.count("\n") == 1 and errors.startswith("boml: ") and not text
    for args in (["imagenet"], ["--colour"], ["--raw", "/nowhere"]):
        code, text, errors = command(*args, program="data_prep.py")
        assert code == 2 and errors.count("\n") == 1 and errors.startswith("data_prep: ") and not text


def test_other_settings_are_refused(tmp_path):
    """A run of other settings in the same folder is not continued; the difference is named."""
    sequence = [toy_data(0)]
    boml.run(toy_config(), facts("maml"), sequence, sequence, tmp_path, lambda *_: None)
    with pytest.raises(boml.Problem, match="outer_rate was 0.001, now 0.1"):
        boml.run(toy_config(outer_rate=0.1), facts("maml"), sequence, sequence, tmp_path, lambda *_: None)


# ----------------------------------------------------------------------------------------------- Preparation


def png(size=(105, 105), seed=0):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 2, size, dtype=np.uint8) * 255).save(file, "PNG")
    return file.getvalue()


def jpg(top, bottom=None, size=(40, 60)):
    """A picture of one colour, the lowest 20 rows of another."""
    file, image = io.BytesIO(), Image.new("RGB", size, top)
    image.paste(bottom or top, (0, size[1] - 20, *size))
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


def tar(path, contents):
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_omniglot(folder):
    for part, alphabets in (("background", ["Greek", "Latin"]), ("evaluation", ["Tagalog"])):
        with zipfile.ZipFile(folder / f"images_{part}.zip", "w") as z:
            for a in alphabets:
                for d in range(3):
                    z.writestr(f"images_{part}/{a}/character01/{d}.png", png(seed=d))


def write_quickdraw(folder):
    for c in ("cat", "The Eiffel Tower"):
        np.save(folder / f"{c}.npy", np.full((4, 784), 255, np.uint8))


def write_cifar(folder, rows=6):
    pixels = np.zeros((rows, 3, 32, 32), np.uint8)
    pixels[:, 0], pixels[:, 2] = 200, 50  # red 200, green 0, blue 50
    labels = np.stack([np.full(rows, 9), np.arange(rows) % 2], 1)  # coarse, fine
    data = np.concatenate([labels, pixels.reshape(rows, -1)], 1).astype(np.uint8)
    files = {"train.bin": data.tobytes(), "test.bin": data[:2].tobytes(), "fine_label_names.txt": b"apple\nbear\n"}
    tar(folder / "cifar-100-binary.tar.gz", {f"cifar-100-binary/{name}": content for name, content in files.items()})


def write_imagenet(folder):
    grey = io.BytesIO()
    Image.new("L", (84, 84), 100).save(grey, "JPEG")
    tar(folder / "mini_imagenet.tar", {"mini_imagenet/n01/a.jpg": jpg("red"), "mini_imagenet/n02/b.jpg": grey.getvalue()})


def write_flowers(folder, compress=False, labels=(2, 1, 2)):
    element = lambda kind, data: np.array([kind, len(data)], "<u4").tobytes() + data + bytes(-len(data) % 8)
    parts = element(6, bytes(8)) + element(5, np.array([1, len(labels)], "<i4").tobytes()) + element(1, b"labels")
    matrix = element(14, parts + element(2, bytes(labels)))
    if compress:
        matrix = zlib.compress(matrix)
        matrix = np.array([15, len(matrix)], "<u4").tobytes() + matrix
    (folder / "imagelabels.mat").write_bytes(b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + matrix)
    tar(folder / "102flowers.tgz", {f"jpg/image_{i + 1:05d}.jpg": jpg("red" if l == 1 else "blue") for i, l in enumerate(labels)})


def write_aircraft(folder):
    base = "fgvc-aircraft-2013b/data"
    tar(folder / "fgvc-aircraft-2013b.tar.gz", {
        f"{base}/images/0000001.jpg": jpg("red", "white"), f"{base}/images/0000002.jpg": jpg("blue", "white"),
        f"{base}/images_variant_trainval.txt": b"0000001 Boeing 717\n",
        f"{base}/images_variant_test.txt": b"0000002 A300B4\n"})


ARCHIVES = {  # how to write it, classes, images
    "omniglot": (write_omniglot, 3, 9), "mini_quickdraw": (write_quickdraw, 2, 8), "cifar_fs": (write_cifar, 2, 8),
    "mini_imagenet": (write_imagenet, 2, 2), "vgg_flowers": (write_flowers, 2, 3), "aircraft": (write_aircraft, 2, 2),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_in_official_layout(name, tmp_path, monkeypatch):
    """A small archive in the official layout is packed to sorted 28x28 bytes with class names, without a pickle."""
    write, classes, images = ARCHIVES[name]
    write(tmp_path)
    monkeypatch.setitem(data_prep.CLASSES, name, classes)
    data_prep.pack(name, tmp_path, tmp_path / "data")
    x, labels, names, _ = data_prep.read_npz(tmp_path / "data" / f"{name}.npz")
    assert len(names) == classes and len(x) == images and x.dtype == np.uint8 and x.shape[1:3] == (28, 28)
    if name == "mini_quickdraw":
        assert (x == 0).all()  # bright strokes on black became dark on white
    if name == "cifar_fs":
        assert (x[0, 14, 14] == [200, 0, 50]).all() and names.tolist() == ["apple", "bear"]
    colours = [("red", "green", "blue")[int(image[-1, 14].argmax())] for image in x] if x.ndim == 4 else []
    if name == "vgg_flowers":
        assert colours == ["red", "blue", "blue"] and names.tolist() == ["001", "002"]
    if name == "aircraft":  # to the last row: the white banner is gone
        assert colours == ["blue", "red"] and names.tolist() == ["A300B4", "Boeing 717"] and x.min() < 30
    if name == "mini_imagenet":
        assert names.tolist() == ["n01", "n02"] and abs(x[1].astype(int) - 100).max() < 5  # grey became RGB


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


@pytest.mark.parametrize("name", ARCHIVES)
def test_damaged_archive(name, tmp_path):
    """An archive cut off, or with the wrong number of classes, ends in a sentence and no file."""
    ARCHIVES[name][0](tmp_path)
    with pytest.raises(data_prep.Problem, match="classes, not"):
        data_prep.pack(name, tmp_path, tmp_path / "data")
    for path in tmp_path.iterdir():
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 8])
    with pytest.raises(data_prep.Problem, match="damaged|cut off|not a readable image"):
        data_prep.pack(name, tmp_path, tmp_path / "data")
    assert not list(tmp_path.glob("data/*.npz"))


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


def bomb(size):
    """An image of one bit per pixel, far larger than its file."""
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    return file.getvalue()


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


HOSTILE = {  # dataset, how to write its archive
    "zip: not one": ("omniglot", lambda f: [(f / f"images_{p}.zip").write_bytes(b"hello") for p in ("background", "evaluation")]),
    "zip: path upwards": ("omniglot", zip_of("images_background/../../evil.png")),
    "zip: absolute path": ("omniglot", zip_of("/etc/evil.png")),
    "zip: backslashes upwards": ("omniglot", zip_of("a\\..\\..\\evil.png")),
    "zip: drive": ("omniglot", zip_of("C:/evil.png")),
    "zip: link": ("omniglot", zip_of(external_attr=0o120777 << 16)),
    "zip: bomb": ("omniglot", zip_of(content=bytes(300 << 20), compress_type=zipfile.ZIP_DEFLATED)),
    "zip: path too short": ("omniglot", zip_of("evil.png")),
    "zip: no image": ("omniglot", zip_of(content=b"\x89PNG\r\n\x1a\nnot really")),
    "zip: empty image": ("omniglot", zip_of(content=b"")),
    "zip: image bomb": ("omniglot", zip_of(content=bomb((20000, 20000)))),
    "zip: wide image bomb": ("omniglot", zip_of(content=bomb((1 << 27, 1)))),
    "tar: not one": ("cifar_fs", lambda f: (f / "cifar-100-binary.tar.gz").write_bytes(b"hello")),
    "tar: empty": ("cifar_fs", lambda f: (f / "cifar-100-binary.tar.gz").write_bytes(b"")),
    "tar: path upwards": ("cifar_fs", tar_of("cifar-100-binary/../../evil")),
    "tar: absolute path": ("cifar_fs", tar_of("/etc/evil")),
    "tar: symbolic link": ("cifar_fs", tar_of(type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "tar: hard link": ("cifar_fs", tar_of(type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "tar: device": ("cifar_fs", tar_of(type=tarfile.CHRTYPE)),
    "tar: a petabyte": ("cifar_fs", tar_of(size=1 << 50)),
    "tar: more declared than there": ("cifar_fs", tar_of(size=100 << 20)),
    "tar: files missing": ("cifar_fs", tar_of()),
    "npy: garbage": ("mini_quickdraw", drawings_of(b"\x93NUMPY\x01\x00\xff\xff{'descr'")),
    "npy: header cut in a bracket": ("mini_quickdraw", drawings_of(b"\x93NUMPY\x01\x00\x10\x00{'shape': (1, (2 ")),
    "npy: shape of booleans": ("mini_quickdraw", drawings_of(npy_of((True, 784)))),
    "npy: version": ("mini_quickdraw", drawings_of(b"\x93NUMPY\x09\x00" + bytes(100))),
    "npy: code in header": ("mini_quickdraw", drawings_of(b"\x93NUMPY\x01\x00\x20\x00__import__('os').system('date')   ")),
    "npy: pickle": ("mini_quickdraw", drawings_of(npy_of((1, 784), "|O", pickle.dumps(Evil())))),
    "npy: exabytes": ("mini_quickdraw", drawings_of(npy_of((1 << 60, 784)))),
    "npy: negative": ("mini_quickdraw", drawings_of(npy_of((-5, 784)))),
    "npy: other shape": ("mini_quickdraw", drawings_of(npy_of((5, 28, 28), data=bytes(5 * 784)))),
    "npy: cut off": ("mini_quickdraw", drawings_of(npy_of((5, 784), data=bytes(784)))),
    "mat: empty": ("vgg_flowers", labels_of(b"")),
    "mat: bomb": ("vgg_flowers", labels_of(struct.pack("<II", 15, 10**6) + zlib.compress(bytes(600 << 20), 1))),
    "mat: not compressed": ("vgg_flowers", labels_of(struct.pack("<II", 15, 8) + b"garbage!")),
    "mat: sizes without sense": ("vgg_flowers", labels_of(struct.pack("<II", 14, 1 << 31) + bytes(64))),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archive(case, tmp_path, monkeypatch):
    """It ends in one sentence, with the data folder as it was, no file anywhere else, and within a gigabyte."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    name, write = HOSTILE[case]
    write(tmp_path / "raw")
    before = sorted(tmp_path.rglob("*"))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        with pytest.raises(data_prep.Problem) as problem:
            data_prep.main([name, "--raw", "raw", "--data", "data"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "\n" not in str(problem.value) and ("raw/" in str(problem.value) or name in str(problem.value))
    assert sorted(tmp_path.rglob("*")) == before


def packed(**changes):
    arrays = dict(images=np.zeros((6, 28, 28), np.uint8), labels=np.repeat([0, 1, 2], 2), names=np.array(["a", "b", "c"]),
                  origin=np.array(["made up", "none"])) | changes
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as z:
        for name, array in arrays.items():
            content = io.BytesIO()
            if not isinstance(array, bytes):
                np.lib.format.write_array(content, array)
            z.writestr(f"{name}.npy", array if isinstance(array, bytes) else content.getvalue())
    return file.getvalue()


@pytest.mark.parametrize("content", [
    b"", b"hello", packed()[:-30], packed(images=npy_of((1 << 40, 28, 28))), packed(images=np.zeros((6, 28, 28))),
    packed(images=np.zeros((6, 27, 28), np.uint8)), packed(images=np.zeros((6, 28, 28, 4), np.uint8)),
    packed(images=npy_of((6, 28, 28), data=b"short")), packed(labels=np.array([0, 0, 1, 1, 2, 9])),
    packed(labels=np.array([0, 0, 1, 1, -1, 2])), packed(labels=np.array([2, 2, 1, 1, 0, 0])),
    packed(labels=np.arange(5)), packed(labels=np.zeros(6)), packed(names=np.array([Evil()] * 3, dtype=object)),
    packed(names=np.array(["a", "b"])), packed(names=np.array(["a", "a", "b"])), packed(names=np.array("abc")),
    packed(labels=np.array([0, 0, 2, 2, 1, 1], np.uint8)), packed(images=b"\x93NUMPY\x01\x00\x10\x00{'descr': ('|u1'"), packed(names=npy_of((3,), "|O", pickle.dumps([Evil()] * 3)))])
def test_hostile_packed_file(content, tmp_path):
    """A packed file that is not what it should be is refused in one sentence that names it."""
    (tmp_path / "cifar_fs.npz").write_bytes(content)
    with pytest.raises(boml.Problem, match="cifar_fs.npz") as problem:
        boml.load_dataset("cifar_fs", tmp_path)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps(Evil()), pickle.dumps({"theta": 1})])
def test_hostile_checkpoint(content, tmp_path, monkeypatch, capsys):
    """A checkpoint that is none is not believed: the run says so and starts from what it can trust."""
    monkeypatch.chdir(tmp_path)
    toy_run(tmp_path / "whole", "maml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(content)
    toy_run(tmp_path / "run", "maml")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert "checkpoint.pt is damaged" in capsys.readouterr().err and not (tmp_path / "owned").exists()


@settings(max_examples=60)
@given(st.sampled_from(["methods", "seeds", "sequence", "schedule", "device", "jobs"] + [
    f.name.replace("_", "-") for f in dataclasses.fields(boml.Config) if f.type != "bool"]), st.text(max_size=12))
def test_any_text_as_an_option(option, text):
    """Whatever stands after an option, the answer is a configuration or one sentence."""
    try:
        boml.parse(["triathlon", f"--{option}={text}"])
    except boml.Problem as problem:
        assert str(problem).strip()


@pytest.mark.skipif(not RAW.is_dir(), reason="the real archives are not here")
@pytest.mark.parametrize("name, images", [("omniglot", 32460), ("mini_quickdraw", 34500), ("cifar_fs", 13000),
                                          ("mini_imagenet", 6000), ("vgg_flowers", 8189), ("aircraft", 1000)])
def test_real_archive(name, images, tmp_path):
    """The real archives pack to their known counts, and load with the paper's split."""
    data_prep.pack(name, RAW, tmp_path)
    data = boml.load_dataset(name, tmp_path)
    assert len(data.images) == images
    assert tuple(len(data.splits[s]) for s in ("train", "val", "test")) == boml.DATASETS[name].classes


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges; /cut breaks off after 1000 bytes, /plain ignores ranges, /gone is not there."""

    CONTENT = np.random.default_rng(0).bytes(5000)

    def do_GET(self):
        if self.path == "/gone":
            return self.send_error(404)
        begin, end = 0, len(self.CONTENT)
        if (wanted := self.headers.get("Range")) and self.path != "/plain":
            begin, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
            begin, end = int(begin), min(int(last) + 1, end) if last else end
            if begin >= end:
                return self.send_error(416)
        self.send_response(206 if wanted and self.path != "/plain" else 200)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.write(self.CONTENT[begin : min(end, begin + 1000) if self.path == "/cut" else end])

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


def test_download_of_a_beginning(server, tmp_path):
    """With a size, just that many first bytes are fetched, also where the connection is cut."""
    for path in ("whole", "cut", "plain"):
        assert data_prep.download(f"{server}/{path}", tmp_path / path, size=2500).read_bytes() == Server.CONTENT[:2500]


def test_wrong_checksum_is_refused(server, tmp_path):
    """A download whose checksum differs is deleted and reported."""
    with pytest.raises(data_prep.Problem, match="has md5"):
        data_prep.download(f"{server}/whole", tmp_path / "f", "0" * 32)
    with pytest.raises(data_prep.Problem, match="does not hold what it should"):
        data_prep.download(f"{server}/whole", tmp_path / "f", check=lambda data: data[:6] == b"\x93NUMPY")
    assert not list(tmp_path.iterdir())


def test_server_without_the_file(server, tmp_path):
    """An error of the server, or no server, leaves the dataset out and nothing behind."""
    with pytest.raises(data_prep.Unreachable, match="404"):
        data_prep.download(f"{server}/gone", tmp_path / "f")
    with pytest.raises(data_prep.Unreachable, match="cannot be reached"):
        data_prep.download("http://127.0.0.1:9/f", tmp_path / "f")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- Benchmark
# bash run.sh bench: each fast path of boml.py beside its plain version, interleaved in one run, one thread.


def bench_cases():
    """name -> (fast, plain): functions without arguments, on float32 noise in the shape of the real thing."""
    def problem(tasks, query, channels, shot=1):
        cfg = boml.Config(channels=channels)
        theta, g = boml.init_params(cfg, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        x = lambda n: torch.rand(tasks, 5 * n, channels, 28, 28, generator=g)
        y = lambda n: torch.arange(5).repeat_interleave(n).expand(tasks, -1)
        return cfg, theta, (x(shot), y(shot), x(query), y(query))

    def step(tasks, query, channels, alpha, k, chunks=boml.chunks):
        _, theta, batch = problem(tasks, query, channels)
        def fast():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(boml, "chunks", chunks)
                boml.meta_gradient(theta, batch, alpha, k, 1.0)
        return (fast, lambda: torch.autograd.grad(plain_loss(theta, batch, alpha, k, 1.0), list(theta.values())))

    def curvature(tasks, query):
        cfg, theta, batch = problem(tasks, query, 3)
        cfg, batch = dataclasses.replace(cfg, averaging="products"), (*batch, *(torch.rand(y.shape) for y in batch[1::2]))
        return (lambda: boml.adapted_curvature(theta, [batch], 0.4, 1, 0.4, cfg),
                lambda: plain_curvature(theta, batch, 0.4, 1, 0.4))

    def variational(tasks, query, samples):
        cfg, theta, batch = problem(tasks, query, 3)
        posterior, g = boml.Variational(dataclasses.replace(cfg, mc_samples=samples), theta), torch.Generator()
        params = [*theta.values(), *posterior.extra.values()]
        return (lambda: posterior.gradient(theta, batch, 0.4, 1, [g] * tasks),
                lambda: torch.autograd.grad(plain_variational(posterior, theta, batch, 0.4, 1, [[g] * samples] * tasks), params))

    def evaluation(tasks, query):
        cfg, theta, batch = problem(tasks, query, 3)
        images = (torch.rand(40, 3, 28, 28) * 255).byte()
        setting = boml.DATASETS["cifar_fs"]
        classes = {"test": torch.arange(10)}
        data = boml.Dataset("noise", "real", [], setting, images, torch.arange(10) * 4, torch.full((10,), 4), classes, 4)
        cfg = dataclasses.replace(cfg, eval_tasks=tasks, query=3)
        return (lambda: boml.evaluate(theta, boml.Point(cfg, theta), data, cfg, 0),
                lambda: plain_accuracy(theta, tuple(b[:, :15] if i > 1 else b for i, b in enumerate(batch)), 0.1, 10))

    return {
        "meta-step, T=32, 75 queries, 1 channel, k=1": lambda: step(32, 15, 1, 0.4, 1),
        "meta-step, T=32, 75 queries, 3 channels, k=1": lambda: step(32, 15, 3, 0.4, 1),
        "meta-step, T=32, 75 queries, 3 channels, k=5": lambda: step(32, 15, 3, 0.1, 5),
        "the same in one pass, as on a GPU": lambda: step(32, 15, 3, 0.1, 5, lambda *_: [slice(None)]),
        "meta-step, cpu schedule (T=4, 25 queries), k=1": lambda: step(4, 5, 3, 0.4, 1),
        "meta-step, cpu schedule (T=4, 25 queries), k=5": lambda: step(4, 5, 3, 0.1, 5),
        "K-FAC, T=8, 75 queries": lambda: curvature(8, 15),
        "BomVI step, T=1, 75 queries, 20 samples": lambda: variational(1, 15, 20),
        "evaluation, 20 tasks, 10 steps": lambda: evaluation(20, 15),
    }


def bench_memory(name, which):
    """In a process of its own: megabytes that one call adds to the peak."""
    call = bench_cases()[name]()[which]
    kilobytes = lambda what: int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
    call()
    print((kilobytes("VmHWM") - before) / 1024)


def bench_torchrun(processes):
    """Seconds of a short run by torchrun, whose processes share two threads."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
                        HERE / "boml.py", "run", "--sequence", "generated_textures", "--methods", "maml", "--iterations", "10",
                        "--meta-batch", "8", "--eval-tasks", "2", "--schedule", "cpu", "--device", "cpu", "--out", out],
                       env=os.environ | {"OMP_NUM_THREADS": str(2 // processes)}, capture_output=True, check=True)
        return json.loads((Path(out) / "run/maml-0/record.jsonl").read_text().split("\n")[-2])["seconds"]


def bench(repeats=3):
    """Medians of interleaved calls, as ratios; writes runs/bench.json."""
    from torch.utils.flop_counter import FlopCounterMode

    def seconds(call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    a = torch.rand(2048, 2048)
    peak = 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(10))
    print(f"one thread, load {os.getloadavg()[0]:.1f}, matrix multiplication peaks at {peak / 1e9:.0f} GFLOP/s")
    print(f"{'':50}{'plain':>9}{'boml.py':>9}{'ratio':>7}{'of peak':>9}{'plain':>10}{'boml.py':>9}")
    rows = {}
    for name, make in bench_cases().items():
        fast, plain = make()
        fast()
        with FlopCounterMode(display=False) as flops:  # which overstates grouped convolutions, as in BomVI's plain version
            fast() if name.startswith("BomVI") else plain()
        pairs = np.array([[seconds(fast), seconds(plain)] for _ in range(repeats)])
        memory = [float(subprocess.run([sys.executable, __file__, name, str(w)], capture_output=True, text=True, check=True)
                        .stdout) for w in (0, 1)]
        quick, slow = np.median(pairs, 0)
        rows[name] = dict(plain_seconds=slow, seconds=quick, ratio=slow / quick, plain_mb=memory[1], mb=memory[0],
                          gflop=flops.get_total_flops() / 1e9, peak_share=flops.get_total_flops() / quick / peak)
        print(f"{name:50}{slow:8.3f}s{quick:8.3f}s{slow / quick:7.2f}{100 * rows[name]['peak_share']:8.0f}%"
              f"{memory[1]:8.0f}MB{memory[0]:7.0f}MB", flush=True)
    data, cfg = toy_data(0, classes=300, most=20, least=20), boml.Config(query=5, meta_batch=4)
    rng = torch.Generator()
    sample = np.median([seconds(lambda: boml.fetch(data, boml.sample_tasks(data, "train", 4, cfg, rng), cfg)) for _ in range(50)])
    theta = boml.init_params(cfg, rng)
    penalty = {}
    for datasets in (3, 50):
        posterior = boml.Laplace(cfg, theta)
        posterior.mean = {n: torch.zeros_like(v) for n, v in theta.items()}
        for _ in range(datasets):
            for name in boml.layers_of(theta):
                D = boml.to_matrix(theta, name)
                wide = (torch.rand(1, D.shape[1], D.shape[1]), torch.rand(1, D.shape[0], D.shape[0]))
                block = (torch.rand(len(D), 2, 2),) if name.startswith("norm") else wide
                old = posterior.blocks.get(name)
                posterior.blocks[name] = boml.merge(boml.add_blocks(old, block), 1) if old else block
        penalty[datasets] = np.median([seconds(lambda: posterior.penalty(theta)) for _ in range(50)])
    rows["sampling 4 tasks"], rows["penalty"] = dict(seconds=sample), {f"after {d}": s for d, s in penalty.items()}
    pairs = np.array([[bench_torchrun(1), bench_torchrun(2)] for _ in range(repeats)])
    one, two = np.median(pairs, 0)
    rows["torchrun"] = {"1 process, 2 threads": one, "2 processes, 1 thread": two}
    step = rows["meta-step, cpu schedule (T=4, 25 queries), k=1"]["seconds"]
    print(f"sampling a meta-batch: {100 * sample / step:.1f} % of the shortest step; penalty after 3 datasets "
          f"{1000 * penalty[3]:.1f} ms, after 50 {1000 * penalty[50]:.1f} ms")
    print(f"torchrun, meta-batches of 8 tasks: 2 processes with a thread each are {one / two:.2f} times as fast as 1 with 2")
    Path("runs").mkdir(exist_ok=True)
    facts = dict(threads=1, load=os.getloadavg()[0], peak_gflops=peak / 1e9, torch=torch.__version__)
    Path("runs/bench.json").write_text(json.dumps(facts | dict(rows=rows), indent=1))


if __name__ == "__main__":
    bench_memory(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else bench()
