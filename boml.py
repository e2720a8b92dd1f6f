# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0",
#   "numpy==2.4.6",
#   "pillow==13.0.0",
#   "pytest==9.2.0",
#   "hypothesis==6.170.15",
# ]
# ///
"""Bayesian online meta-learning: learn one few-shot dataset after another without forgetting.

A reproduction of Yap, Ritter and Barber, "Addressing Catastrophic Forgetting in Few-Shot
Problems", ICML 2021, in one module to read from top to bottom with the paper at hand:

    Eqs. 1, 2            adapt, meta_gradient           MAML
    Eqs. 10, 21 to 23    fisher_blocks                  K-FAC: the Fisher as A (x) G per layer
    Eqs. 11, 25 to 28    adapted_curvature, sandwich    the Fisher seen through the adaptation
    Eqs. 24, 29          times, Laplace                 BomLA: penalty and precision
    Eqs. 14, 33, 34      Variational                    BomVI: likelihoods and KL
    Eqs. 8, 14           meta_step                      adds Posterior.gradient and .penalty
    Section 6.1          METHODS, from_all, from_buffer the baselines; a new method is added here
    Algorithms 1, 2      Run.go, Run.save               one dataset after another; a checkpoint
    Tables 1 to 3        Config, DATASETS, EXPERIMENTS

The lesson ends with Run.go; the rest is bookkeeping. DIFFERS marks the main departures from the
paper or the authors' code; the README has a list.
`bash run.sh triathlon` (data_prep.py) prepares the data, runs all methods and reports;
`python boml.py triathlon --method bomla` is one run, if data/ is there.

Symbols: a task has N classes ("way"), each with K support and Q query images ("shot", "query").
A meta-batch has M tasks; a stage, the training on one dataset, has J iterations. alpha is the
inner rate, k the number of inner steps, lambda the weight of the past, S the number of Monte
Carlo samples. T is the length of a tensor's task axis, B of its image axis; a layer has C inputs, O
outputs and P parameters for each output; names end in _s for support sets, _q for query sets.

Measured on real images (long schedule, three seeds, torch 2.13.0 on a CPU, revision a3cf605;
figures/triathlon): accuracy on Omniglot right after its 5000 iterations -> after those on
miniQuickDraw and CIFAR-FS: sequential MAML 97.2 -> 50.5 %, BomLA 97.3 -> 96.2 %, BomVI
96.1 -> 71.6 %, with all old data Follow-The-Meta-Leader 97.3 -> 97.5 %.
"""
import os, signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning: 15x slower on shared cores
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: fewer page faults

import argparse, contextlib, dataclasses, fcntl, functools, hashlib, io, itertools, json, math
import subprocess, sys, time, zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent


class Problem(Exception):
    """An error that the user can fix: shown as one sentence, exit status 2."""


def need(condition, sentence):
    if not condition:
        raise Problem(sentence)


def flag(name):
    return "--" + name.replace("_", "-")


def check(name, value, low):
    need(low <= value <= 10**6, f"{flag(name)} is {value}; it must be from {low} to 1000000.")


def say(sentence):
    print(sentence, file=sys.stderr, flush=True)


def brief(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


# ------------------------------------------------------------------------------------ Configuration


def option(default, text: str, low=None, choices=None):
    """A field of Config. Its smallest value is `low`, else 1 for an int and 0 for a float."""
    return dataclasses.field(default=default, metadata=dict(help=text, low=low, choices=choices))


@dataclass(frozen=True)
class Config:
    """The defaults are the paper's (Table 1), unless a help text says otherwise."""

    way: int = option(5, "N, classes per task", 2)
    shot: int = option(1, "K, support images per class")
    query: int = option(15, "Q, query images per class")
    channels: int = option(3, "image channels; a grey image is copied to all")
    filters: int = option(64, "filters of each conv layer")
    meta_batch: int = option(32, "M, tasks per meta-batch")
    outer_rate: float = option(0.001, "learning rate of Adam")
    eval_tasks: int = option(100, "tasks per evaluation of a dataset")
    eval_every: int = option(500, "iterations between evaluations")
    split: str = option("test", "classes to evaluate on", choices=("test", "val"))
    past_weight: float = option(100.0, "lambda, the weight of each dataset's curvature (BomLA); "
                                "after each dataset the prior's variance is the posterior's "
                                "divided by lambda (BomVI)", 1e-9)
    hessian_tasks: int = option(5000, "tasks for a dataset's curvature (BomLA)")
    averaging: str = option("averages", "product of averages over tasks, or average of products as "
                            "in the paper (BomLA)", choices=("averages", "products"))
    jacobian_rate: float | None = option(None, "rate in the adaptation's Jacobian, if not alpha; "
                                         "the paper has 1, 0 is no Jacobian (BomLA)")
    merge_rank: int = option(1, "Kronecker pairs kept per layer; 0, the paper: all; 2 or more "
                             "may not be positive semi-definite (BomLA)", 0)
    exact_labels: bool = option(False, "Fisher by all labels, as in the paper, not by one draw "
                                "(BomLA)")
    support_hessian: bool = option(False, "add the support loss's curvature (BomLA)")
    mc_samples: int = option(20, "S, Monte Carlo samples (BomVI)")
    initial_logvar: float = option(-10.0, "initial log-variance; the paper: -5 or -10 (BomVI)", -99)
    first_variance: float = option(1.0, "variance of the first prior, whose mean is the initial "
                                   "theta; the authors': exp(initial_logvar) (BomVI)", 1e-9)
    logvar_rate: float = option(0.001, "learning rate of the log-variances (BomVI)")
    kl_weight: float | str = option("authors", "weight of the KL: paper, 1/(N Q); authors, "
                                    "1/48000; or a number (BomVI)")
    tasks: int = option(230, "tasks in the Omniglot sequence, at most 230; the authors have 254")
    keep_labels: bool = option(False, "label a training task's classes in their order, so that in "
                               "the Omniglot sequence each keeps its label, as in the authors'")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), field.metadata["low"]
            if isinstance(value, (int, float)):
                check(field.name, value, low if low is not None else int(field.type is int))


class Setting(NamedTuple):
    """How a dataset is learned (Tables 2 and 3)."""

    inner_rate: float  # alpha
    inner_steps: int  # k in meta-training
    eval_steps: int  # k in meta-evaluation
    decay: tuple[float, ...] = ()  # fractions of J where the outer rate falls to a tenth
    stand_in: str = ""  # its generated replacement
    rotate: bool = False  # every 90 degree rotation of a class is a separate class
    iterations: int = 5000  # J


DATASETS = {
    "omniglot": Setting(0.4, 1, 3, (), "generated_characters", rotate=True),
    "mini_quickdraw": Setting(0.2, 3, 5, (0.5,), "generated_doodles"),
    "cifar_fs": Setting(0.1, 5, 10, (0.5,), "generated_textures"),
    "mini_imagenet": Setting(0.1, 5, 10, (0.5,), "generated_scenes"),
    "vgg_flowers": Setting(0.1, 5, 10, (0.2, 0.4, 0.6, 0.8), "generated_blossoms"),
    "aircraft": Setting(0.1, 5, 10, (0.5,), "generated_aeroplanes"),
    "omniglot_alphabets": Setting(0.1, 5, 10, (), "generated_alphabets"),  # Table 3
}
DATASETS |= {s.stand_in: s._replace(stand_in="", rotate=False) for s in DATASETS.values()}
OWN = Setting(0.1, 5, 10, (0.5,))  # for a folder of one's own images
PER_DATASET = dict(iterations="J", inner_rate="alpha", inner_steps="k in meta-training",
                   eval_steps="k in meta-evaluation")  # options by dataset


class Experiment(NamedTuple):
    sequence: tuple[str, ...]
    cpu: dict = {}  # overrides the cpu schedule
    every: dict = {}  # overrides all schedules
    past_weight: dict = {"bomla": 100.0, "bomvi": 1.0}  # lambda


EXPERIMENTS = {
    "triathlon": Experiment(("omniglot", "mini_quickdraw", "cifar_fs"),
                            dict(iterations=(250, 150, 450))),
    "pentathlon": Experiment(("omniglot", "cifar_fs", "mini_imagenet", "vgg_flowers", "aircraft"),
                             dict(iterations=(150,))),
    "omniglot": Experiment(  # Table 3: the tasks of one dataset, one after another
        ("omniglot_alphabets",),
        dict(tasks=40, iterations=(20,), eval_tasks=20, mc_samples=1),
        dict(shot=5, channels=1, meta_batch=1, iterations=(50,), hessian_tasks=1, mc_samples=5),
        {"bomla": 0.01, "bomvi": 1.0}),
    "run": Experiment(()),  # any --sequence
}
SCHEDULES = {
    "paper": {},
    # Fewer tasks, query images and samples; in "cpu" fewer iterations, too: so faster variances.
    "long": dict(query=5, meta_batch=4, hessian_tasks=1000, mc_samples=1),
    "cpu": dict(iterations=(300,), query=5, meta_batch=4, eval_every=450, hessian_tasks=100,
                mc_samples=1, logvar_rate=0.005),
}

# --------------------------------------------------------------------------------------------- Data
# data_prep.py packs or draws data/<name>.npz: images (n, 28, 28[, 3]) uint8, labels (n,); of each
# class its name, `classes`, and "train", "val" or "test", `split`; origin: "real", "generated" or
# "own", if it was a folder of one's own images.

SPLITS = ("train", "val", "test")


class Dataset(NamedTuple):
    name: str
    kind: str  # "real", "generated" or "own"
    classes: list[str]
    setting: Setting
    images: Tensor  # (n, C, 28, 28) uint8; None, as rows, if they are gone
    rows: Tensor  # (classes, most): indices of each class's images, padded with -1
    splits: dict[str, Tensor]  # train, val, test: indices of classes
    checksum: str = ""
    alphabet: Tensor | None = None  # (classes,) where a task must be of one alphabet


def read_npz(path: Path) -> list:
    """images, labels, classes, split and origin of a packed dataset."""
    make = f"make it with: bash run.sh data {path.stem} --data {path.parent}"
    need(path.is_file(), f"{path} is not there; {make}.")
    try:
        with np.load(path, allow_pickle=False) as z:
            arrays = [z[key] for key in ("images", "labels", "classes", "split", "origin")]
        images, labels, classes, split, origin = arrays
        need(images.dtype == np.uint8 and images.shape[1:] in ((28, 28), (28, 28, 3))
             and labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
             and classes.shape == split.shape == (len(set(classes.tolist())),)
             and len(classes) and len(origin)
             and np.array_equal(np.unique(labels), np.arange(len(classes)))
             and set(split.tolist()) <= set(SPLITS), "its arrays do not fit together")
        return arrays
    except PermissionError:  # nothing is wrong with its bytes
        raise Problem(f"{path} may not be read; change its permissions.")
    except Exception as error:  # NumPy raises almost anything on bad bytes
        raise Problem(f"{path} is damaged ({brief(error)}); delete it and {make}.")


def load_dataset(path: Path, setting: Setting, device="cpu") -> Dataset:
    arrays = read_npz(path)
    images, labels, classes, split, kind = arrays
    checksum = hashlib.md5(b"".join(a.tobytes() for a in arrays[:4])).hexdigest()[:8]
    if setting.rotate:
        images = np.concatenate([np.rot90(images, r, (1, 2)) for r in range(4)])
        labels = np.concatenate([labels.astype(int) + r * len(classes) for r in range(4)])
        classes = [f"{c} turned {90 * r}" for r in range(4) for c in classes]
        split = np.tile(split, 4)
    count = np.bincount(labels)
    rows = np.full((len(classes), count.max()), -1)
    rows[np.arange(count.max()) < count[:, None]] = np.argsort(labels, kind="stable")  # by class
    images = images.reshape(len(images), 28, 28, -1).transpose(0, 3, 1, 2)
    arrays = images, rows, *(np.flatnonzero(split == s) for s in SPLITS)
    images, rows, *splits = (torch.from_numpy(a).to(device) for a in arrays)
    splits = dict(zip(SPLITS, splits))
    return Dataset(path.stem, str(kind[0]), list(classes), setting, images, rows, splits, checksum)


def check_dataset(data: Dataset, cfg: Config):
    """Refuse one that cannot yield the tasks of cfg."""
    colours, count = data.images.shape[1], (data.rows >= 0).sum(1)
    need(colours in (1, cfg.channels), f"{data.name} needs --channels {colours}.")
    need(count.min() >= cfg.shot + cfg.query, f"{data.name}'s {data.classes[count.argmin()]} "
         f"has {count.min()} images, too few for --shot {cfg.shot} and --query {cfg.query}; lower "
         "them.")
    n = min(len(data.splits["train"]), len(data.splits[cfg.split]))
    need(n >= cfg.way, f"{data.name} has only {n} training or {cfg.split} classes, too few for "
         f"--way {cfg.way}; lower it, or add some.")


def task_sequence(data: Dataset, cfg: Config, seed: int) -> tuple[list[Dataset], Dataset]:
    """The Omniglot sequence: tasks, each a dataset, and what to evaluate on. Classes are named
    alphabet/character; alphabets come in random order, cut into tasks of N characters; a task to
    evaluate on is of one unseen alphabet.

    DIFFERS: an alphabet's last, incomplete task is left out, 24 of the authors' 254.
    """
    rng, tasks, N = np.random.default_rng(seed), [], cfg.way
    names, number = np.unique([c.split("/")[0] for c in data.classes], return_inverse=True)

    def alphabets(split):  # number of an alphabet: its classes in this split, if it fills a task
        classes = data.splits[split].cpu().numpy()
        parts = {a: classes[number[classes] == a] for a in range(len(names))}
        return {a: part for a, part in parts.items() if len(part) >= N}

    def index(classes):
        return torch.from_numpy(np.array(classes)).to(data.rows)

    training = alphabets("train")
    for a in rng.permutation(list(training)):
        characters = rng.permutation(training[a])
        for n in range(len(characters) // N):
            chosen = index(characters[n * N : (n + 1) * N])
            tasks.append(data._replace(name=f"{names[a]} {n + 1}", splits={"train": chosen}))
    unseen = {s: index([c for part in alphabets(s).values() for c in part]) for s in SPLITS[1:]}
    need(tasks and len(unseen[cfg.split]), f"no alphabet has {N} characters; lower --way.")
    judge = data._replace(name="unseen alphabets", splits=unseen, alphabet=index(number))
    return tasks[: cfg.tasks], judge


def stream(device, *key) -> torch.Generator:
    """A generator seeded by its purpose: a resumed run draws what the unbroken one would."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1
    return torch.Generator(device).manual_seed(seed)


def sample_tasks(data: Dataset, split: str, tasks: int, cfg: Config, rng) -> Tensor:
    """Indices of images (T, N, K+Q). The classes with the N largest uniform numbers are N random
    ones in random order: a class has another label in each task, unless keep_labels sorts them."""
    device, classes = data.images.device, data.splits[split]
    u = torch.rand(tasks, len(classes), generator=rng, device=device)
    if data.alphabet is not None:  # only the first class's alphabet
        alphabet = data.alphabet[classes]
        u = u.masked_fill(alphabet != alphabet[u.argmax(1)][:, None], -1)
    chosen = u.topk(cfg.way).indices
    if cfg.keep_labels and split == "train":
        chosen = chosen.sort().values
    rows = data.rows[classes[chosen]]  # (T, N, most)
    u = torch.rand(rows.shape, generator=rng, device=device).masked_fill(rows < 0, -1)
    return rows.gather(2, u.topk(cfg.shot + cfg.query).indices)


def to_floats(x: Tensor, channels: int) -> Tensor:
    """Bytes (..., C, 28, 28) as floats, each image stretched over [0, 1], grey ones repeated."""
    low, high = x.amin((-3, -2, -1), keepdim=True), x.amax((-3, -2, -1), keepdim=True)
    x = (x - low) / (high - low).clamp(min=1).to(torch.get_default_dtype())
    return x.expand(*x.shape[:-3], channels, 28, 28)


def fetch(data: Dataset, index: Tensor, cfg: Config) -> tuple[Tensor, ...]:
    """Tasks as x_s (T, NK, C, 28, 28), y_s (T, NK), x_q (T, NQ, C, 28, 28) and y_q (T, NQ)."""
    x = to_floats(data.images[index], cfg.channels)
    y = torch.arange(cfg.way, device=x.device)[:, None].expand(index.shape)
    support, query = slice(0, cfg.shot), slice(cfg.shot, None)
    return tuple(part[:, :, s].flatten(1, 2) for s in (support, query) for part in (x, y))


# ------------------------------------------------------------------------------------------ Network

Params = dict[str, Tensor]


def init_params(cfg: Config, rng, device="cpu") -> Params:
    """Weights uniform in +-1/sqrt(fan-in). Convs have no bias: batch norm would cancel it."""

    def uniform(*shape):
        return (torch.rand(*shape, generator=rng) * 2 - 1) / math.sqrt(math.prod(shape[1:]))

    p, C, O = {}, cfg.channels, cfg.filters
    for i in range(1, 5):
        p[f"conv{i}.weight"] = uniform(O, C, 3, 3)
        p[f"norm{i}.weight"], p[f"norm{i}.bias"] = torch.ones(O), torch.zeros(O)
        C = O
    p["linear.weight"], p["linear.bias"] = uniform(cfg.way, O), torch.zeros(cfg.way)
    return {n: v.to(device).requires_grad_() for n, v in p.items()}


def plain_network(p: Params, x: Tensor) -> Tensor:
    """Logits (B, N) for images x (B, C, 28, 28), as anyone would write it; tests compare `network`,
    its fast form, with this. Batch norm always uses the batch's statistics: transductive, as in
    MAML."""
    for i in range(1, 5):
        x = F.conv2d(x, p[f"conv{i}.weight"], padding=1)
        x = F.batch_norm(x, None, None, p[f"norm{i}.weight"], p[f"norm{i}.bias"], training=True)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), p["linear.weight"], p["linear.bias"])


# The fast form, 1.5 to 1.9 times as fast as a loop over tasks on a CPU (bash run.sh bench). Each
# parameter has a task axis (T, ...); T networks run as the groups of a grouped convolution, and on
# (B, T*C, H, W) native batch norm keeps the tasks' statistics apart.


def patches(x: Tensor, T: int) -> Tensor:
    """The 3x3 patches around every location: (B, T*C, H, W) -> (T, 9C, B*H*W)."""
    return F.unfold(x, 3, padding=1).unflatten(1, (T, -1)).permute(1, 2, 0, 3).flatten(2)


def layer(p: Params, name: str, x: Tensor, second_order=False) -> Tensor:
    """One layer of T networks: conv or norm on x (B, T*C, H, W), linear on x (T, B, features)."""
    w, twice_on_gpu = p[f"{name}.weight"], second_order and x.device.type != "cpu"
    if name.startswith("conv") and twice_on_gpu:
        # On a GPU a grouped convolution's second derivative loops over the groups.
        h = w.flatten(2) @ patches(x, len(w))  # (T, O, B*H*W)
        return h.unflatten(2, (len(x), *x.shape[2:])).permute(2, 0, 1, 3, 4).flatten(1, 2)
    if name.startswith("conv"):
        return F.conv2d(x, w.flatten(0, 1), padding=1, groups=len(w))
    if name.startswith("norm") and twice_on_gpu:  # batch norm's launches more kernels
        x, b = x.transpose(0, 1), p[f"{name}.bias"].reshape(-1, 1, 1, 1)
        h = torch.addcmul(b, F.layer_norm(x, x.shape[1:]), w.reshape(-1, 1, 1, 1))
        return h.transpose(0, 1)
    if name.startswith("norm"):
        return F.batch_norm(x, None, None, w.flatten(), p[f"{name}.bias"].flatten(), training=True)
    return x @ w.mT + p[f"{name}.bias"][:, None]


def first_block(p: Params, x: Tensor) -> Tensor:
    """conv1 and norm1 as one matrix product, then max-pool: saves 7 to 20 % of a meta-step.

    Centred patches have covariance V, so filter w's output has variance w'Vw: batch norm folds
    into a scale of the filter; its shift is added after the pool.
    """
    w = p["conv1.weight"].flatten(2)  # (T, O, 9C)
    T, (B, _, H, W) = len(w), x.shape
    cols = patches(x, T)
    cols -= cols.mean(2, keepdim=True)
    V = cols @ cols.mT / cols.shape[2]  # (T, 9C, 9C)
    scale = p["norm1.weight"] * (((w @ V) * w).sum(2) + 1e-5).rsqrt()  # (T, O)
    h = (cols.mT @ (w * scale[..., None]).mT).view(T * B, H, W, -1).permute(0, 3, 1, 2)
    h = F.max_pool2d(h, 2)
    if h.requires_grad:  # in another layout, the gradient would make the pool copy its input
        h.register_hook(lambda g: g.contiguous(memory_format=torch.channels_last))
    h = h.unflatten(0, (T, B)) + p["norm1.bias"][:, None, :, None, None]
    return h.transpose(0, 1).flatten(1, 2)


def network(p: Params, x: Tensor, apply=layer, second_order=False) -> Tensor:
    """Logits (T, B, N) of T networks, each on its own images x (T, B, C, 28, 28).

    `apply` replaces `layer`, to watch the layers or to add noise (not with second_order).
    Channels-last is the faster layout, but not with second derivatives.
    """
    T, layout = len(x), torch.contiguous_format if second_order else torch.channels_last
    x = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=layout)  # (B, T*C, 28, 28)
    folds = apply is layer  # neither watched nor noisy
    apply = functools.partial(layer, second_order=True) if second_order else apply
    for i in range(1, 5):
        if i == 1 and folds:
            x = first_block(p, x)
        else:
            x = F.max_pool2d(apply(p, f"norm{i}", apply(p, f"conv{i}", x)), 2)
        x = F.relu(x)  # after the pool: the same, on a quarter of the values
    return apply(p, "linear", x.reshape(len(x), T, -1).transpose(0, 1))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over the images of each task: (T, B, N), (T, B) -> (T,)."""
    return F.cross_entropy(logits.mT, y, reduction="none").mean(1)


# --------------------------------------------------------------------------------------------- MAML


def spread(theta: Params, T: int) -> Params:
    """Add a task axis (T, ...) without copying."""
    return {n: v.expand(T, *v.shape) for n, v in theta.items()}


def leaves(p: Params, part=slice(None)) -> Params:
    """Some tasks' parameters, detached, as leaf tensors."""
    return {n: v[part].detach().requires_grad_() for n, v in p.items()}


def chunks(T: int, device) -> list[slice]:
    """The tasks of each query pass: one on a CPU, to stay in cache; all on a GPU."""
    size = 1 if device.type == "cpu" else T
    return [slice(t, t + size) for t in range(0, T, size)]


def adapt(p: Params, x, y, alpha, k, second_order=False, net=network) -> tuple[Params, Tensor]:
    """Eq. 1: k steps of SGD on the support loss, all tasks at once; alpha (T,) or (1,).

    Also returns that loss (T,) before the first step.
    """
    losses = []
    for _ in range(k):
        losses.append(cross_entropy(net(p, x, second_order=second_order), y))
        grads = torch.autograd.grad(losses[-1].sum(), p.values(), create_graph=second_order)
        p = {n: v - alpha.view(-1, *[1] * (g.dim() - 1)) * g for (n, v), g in zip(p.items(), grads)}
        p = p if second_order else leaves(p)
    return p, losses[0]


def meta_gradient(theta: Params, batch, alpha, k, support_weight, net=network):
    """Sum over tasks of L(adapted, query) + support_weight L(theta, support), and its true,
    second-order gradient. support_weight 0 gives Eq. 2, K/Q the likelihoods of Eq. 8.

    To save memory, first dL/d(adapted), by chunks of tasks; then, with that as the cotangent,
    one backward pass through the adaptation of all tasks.
    """
    x_s, y_s, x_q, y_q = batch
    T, cotangents = len(x_s), []
    adapted, support_loss = adapt(spread(theta, T), x_s, y_s, alpha, k, second_order=True, net=net)
    loss = support_weight * support_loss.detach().sum()
    for part in chunks(T, x_s.device):
        leaf = leaves(adapted, part)
        query_loss = cross_entropy(net(leaf, x_q[part]), y_q[part]).sum()
        cotangents.append(torch.autograd.grad(query_loss, leaf.values()))
        loss = loss + query_loss.detach()
    outputs = [*adapted.values(), support_loss]
    cotangents = [torch.cat(c) for c in zip(*cotangents)]
    cotangents.append(torch.full_like(support_loss, support_weight))
    return loss, torch.autograd.grad(outputs, theta.values(), cotangents)


# -------------------------------------------------------------------------------- Several processes
# Under torchrun the ranks share the tasks of each meta-batch, curvature and evaluation.

TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # not RANK alone, which some clusters set
_env = os.environ if TORCHRUN else dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)
RANK, RANKS, LOCAL_RANK = (int(_env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def start_ranks(args):
    """Join the other processes; each must have a task of every evaluation and curvature."""
    cfg = args.job.cfg
    fewest = min(cfg.eval_tasks, cfg.hessian_tasks if args.method == "bomla" else math.inf)
    need(RANKS <= fewest, f"{RANKS} processes are too many for {fewest} tasks of an evaluation or "
         "a curvature; start fewer.")
    backend, gpu = "gloo", None
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        need(LOCAL_RANK < gpus, f"torchrun starts more processes than the {gpus} GPUs here.")
        torch.cuda.set_device(LOCAL_RANK)
        backend, gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", LOCAL_RANK)
    torch.distributed.init_process_group(backend, device_id=gpu)
    sys.stdout = open(os.devnull, "w") if RANK else sys.stdout


def share(before=0) -> slice:
    """This rank's share of the tasks; `before`: those already dealt out."""
    return slice((RANK - before) % RANKS, None, RANKS)


def sum_over_ranks(values: list[Tensor]) -> list[Tensor]:
    if RANKS == 1:
        return values
    flat = torch.cat([v.flatten() for v in values])
    torch.distributed.all_reduce(flat)
    return [part.view_as(v) for part, v in zip(flat.split([v.numel() for v in values]), values)]


def from_first_rank(content: bytes, device) -> bytes:
    """The first rank's content: the ranks need not share a disk. Not sent as a pickle."""
    if RANKS == 1:
        return content
    size = torch.tensor([len(content)], device=device)
    torch.distributed.broadcast(size, 0)
    buffer = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if RANK == 0 and content:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    torch.distributed.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


def same_on_all_ranks(p: Params):
    one = torch.stack([v.detach().double().sum() for v in p.values()])
    need(torch.allclose(sum_over_ranks([one])[0], RANKS * one, 1e-12, 0), "the processes have "
         "different parameters; start them with the same program, data and options.")


# --------------------------------------------------------------------------------------- Posteriors
# Eqs. 8 and 14 sum log-likelihoods over images. Here they are divided by the N Q query images: the
# mean over the query set plus K/Q times the mean over the support set. BomLA's precision fits that,
# its Fisher being a mean over images; BomVI's KL has `kl_weight`.


class Posterior:
    """What a method carries from dataset to dataset beside theta: nothing, for the baselines."""

    decays = True  # the outer rate follows the dataset's schedule
    carries = ()  # the attributes that a checkpoint holds

    def __init__(self, cfg: Config, theta: Params):
        self.cfg, self.support_weight = cfg, 0.0  # Eq. 2 has no support term

    def parameters(self, theta: Params) -> list[dict]:
        """What is trained, as Adam's parameter groups, theta first."""
        return [dict(params=theta.values(), lr=self.cfg.outer_rate)]

    def gradient(self, theta: Params, batch, alpha, k, rngs):
        """The losses, summed over tasks, and their gradient; rngs: a generator per task."""
        return meta_gradient(theta, batch, alpha, k, self.support_weight)

    def penalty(self, theta: Params):
        """The prior's part of the objective, and its gradient."""
        return 0.0, [0.0] * len(theta)

    def absorb(self, theta: Params, data: Dataset, rng):
        """The update at the end of a dataset's stage."""

    def predict(self, adapted: Params, x: Tensor, rngs) -> dict[str, Tensor]:
        """Log-probabilities (T, B, N), by a prefix for the names of their scores."""
        return {"": network(adapted, x).log_softmax(-1)}

    def state(self) -> dict:
        return {name: getattr(self, name) for name in self.carries}

    def load(self, state: dict):
        for name in self.carries:
            setattr(self, name, state[name])


# ------------------------------------------------------------------------------------------ Laplace
# BomLA: theta ~ N(mean, precision^-1), the precision with a block for each layer. A block is a sum
# of Kronecker products that are never formed: (A (x) G) vec(D) = vec(G D A') (Eq. 24), where D
# (O, P) holds the layer's parameters, A is (P, P) and G is (O, O):
#   conv    D (O, 9C), in the order of F.unfold: channel, row, column
#   linear  D (N, features + 1), the bias last
#   norm    D (O, 2), scale and shift; the block is not a product but (O, 2, 2), one per channel

# (A, G) of T networks, (T, P, P) and (T, O, O); their mean, (P, P) and (O, O); or the sides of a
# sum of r pairs, (r, P, P) and (r, O, O). A norm layer has one tensor, (T, O, 2, 2) or (O, 2, 2).
Block = tuple[Tensor, ...]


def filled(p: Params, value: float) -> Params:
    return {n: torch.full_like(v, value) for n, v in p.items()}


def layers_of(p: Params) -> list[str]:
    return [n.removesuffix(".weight") for n in p if n.endswith(".weight")]


def to_matrix(p: Params, name: str) -> Tensor:
    weight = p[f"{name}.weight"]
    if name.startswith("conv"):
        return weight.flatten(1)
    return torch.cat([weight.view(len(weight), -1), p[f"{name}.bias"][:, None]], 1)


def input_factor(name: str, x: Tensor, T: int) -> Tensor:
    """A (T, P, P): the input's outer products, summed over locations, mean over images. A sum here
    and a mean in G: gradients at a conv's locations count as independent and alike (Grosse and
    Martens 2016)."""
    if name.startswith("conv"):
        cols = patches(x, T)
        return cols @ cols.mT / len(x)
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1)  # (T, B, features + 1)
    return x.mT @ x / x.shape[1]


def output_factor(name: str, x: Tensor, g: Tensor, T: int) -> Tensor:
    """G (T, O, O): the mean over images and locations of g g', where g is the output's gradient.

    Batch norm: (T, O, 2, 2), a block per channel (Osawa et al. 2020), the outer product of the
    batch's summed gradient in (scale, shift), over B: its statistics mix the images, so each image
    alone would be wrong.
    """
    if name.startswith("conv"):
        g = g.unflatten(1, (T, -1)).permute(1, 2, 0, 3, 4).flatten(2)  # (T, O, B*H*W)
        return g @ g.mT / g.shape[2]
    if name.startswith("norm"):
        normal = F.batch_norm(x, None, None, training=True)
        g = torch.stack([(g * normal).sum((0, 2, 3)), g.sum((0, 2, 3))], -1).unflatten(0, (T, -1))
        return g[..., None] * g[..., None, :] / len(x)  # from (T, O, 2)
    return g.mT @ g / g.shape[1]


def fisher_blocks(p: Params, x: Tensor, u: Tensor, exact: bool, net=network) -> dict[str, Block]:
    """Eqs. 10, 21 to 23: K-FAC of T networks on their inputs x (T, B, ...), a block for each layer.

    Labels are the model's own, never the data's: one draw, by uniform numbers u (T, B); or `exact`,
    the expectation, by N gradients sqrt(pi_c) (pi - e_c) in the logits, whose outer products sum to
    diag(pi) - pi pi', where pi are the probabilities. Batch norm's gradients are summed over images
    before they are squared: independent labels, or with `exact` random signs, cancel the cross
    terms on average.
    """
    seen = {}

    def watched(p, name, x):
        seen[name] = x.detach(), layer(p, name, x)
        return seen[name][1]

    logits = net(p, x, watched)  # (T, B, N)
    prob = logits.detach().softmax(-1)
    one_hot = torch.eye(prob.shape[-1], dtype=prob.dtype, device=prob.device)
    if exact:
        sign = torch.where(u < 0.5, -1.0, 1.0).to(prob)[..., None]
        cotangents = [sign * prob[..., c, None].sqrt() * (prob - e) for c, e in enumerate(one_hot)]
    else:
        label = (prob.cumsum(-1)[..., :-1] <= u[..., None]).sum(-1)
        cotangents = [prob - one_hot[label]]
    outputs, G = [h for _, h in seen.values()], dict.fromkeys(seen, 0.0)
    for cotangent in cotangents:
        grads = torch.autograd.grad(logits, outputs, cotangent, retain_graph=True)
        for (name, (inputs, _)), g in zip(seen.items(), grads):
            G[name] = G[name] + output_factor(name, inputs, g, len(x))
    return {n: (G[n],) if n.startswith("norm") else (input_factor(n, inputs, len(x)), G[n])
            for n, (inputs, _) in seen.items()}


def sandwich(support: Block, query: Block, a: float) -> Block:
    """(I - a A(x)G) (A_q(x)G_q) (I - a A(x)G)', multiplied out (Eqs. 25 to 27) as four pairs:
    A_q(x)G_q - a AA_q(x)GG_q - a A_qA(x)G_qG + a^2 AA_qA(x)GG_qG. (..., P, P) -> (..., 4, P, P)"""
    if len(support) == 1:
        jacobian = torch.eye(2, dtype=support[0].dtype, device=support[0].device) - a * support[0]
        return (jacobian @ query[0] @ jacobian.mT,)
    sides = []
    for X, X_q in zip(support, query):  # both symmetric, so X_q X is the transpose of X X_q
        XX_q = X @ X_q
        sides.append(torch.stack([X_q, XX_q, XX_q.mT, XX_q @ X], -3))
    return sides[0], sides[1] * sides[1].new_tensor([1, -a, -a, a * a])[:, None, None]


def add_blocks(one: Block, other: Block) -> Block:
    """The sum; Kronecker pairs are kept side by side."""
    return (one[0] + other[0],) if len(one) == 1 else tuple(map(torch.cat, zip(one, other)))


def adapted_curvature(theta: Params, batches, alpha, k, a: float, cfg: Config, net=network):
    """Eqs. 11, 25 to 28: the Fisher of the query sets at the adapted parameters, mapped back to
    theta by I - a H, the Jacobian of an adaptation of one step; a block for each layer.

    DIFFERS: the paper has a = 1 (Eq. 12), but a step of SGD has a = alpha.
    `averages`, as in the authors' code: A, G, A_q, G_q are averaged over tasks, then multiplied.
    `products` (Eq. 28): multiplied out for each task, then each side of the four pairs is averaged.
    A batch is x_s, y_s, x_q, y_q, and u_s, u_q for fisher_blocks.
    """
    products, tasks = cfg.averaging == "products", 0
    support_sums, query_sums, blocks = {}, {}, {}

    def add(sums, name, block):  # its sum over tasks
        old = sums.get(name, [0.0] * len(block))
        sums[name] = [total + f.sum(0) for total, f in zip(old, block)]

    for x_s, y_s, x_q, _, u_s, u_q in batches:
        start = leaves(spread(theta, len(x_s)))
        support = fisher_blocks(start, x_s, u_s, cfg.exact_labels, net)
        adapted, _ = adapt(start, x_s, y_s, alpha, k, net=net)
        query = [fisher_blocks(leaves(adapted, part), x_q[part], u_q[part], cfg.exact_labels, net)
                 for part in chunks(len(x_s), x_s.device)]
        for name, s in support.items():
            q = tuple(map(torch.cat, zip(*(part[name] for part in query))))
            add(query_sums, name, sandwich(s, q, a) if products else q)
            add(support_sums, name, s)
        tasks += len(x_s)
    tasks = sum_over_ranks([x_s.new_tensor(tasks)])[0]
    for name in support_sums:
        s, q = (tuple(f / tasks for f in sum_over_ranks(sums[name]))
                for sums in (support_sums, query_sums))
        blocks[name] = q if products else sandwich(s, q, a)  # four pairs, but for norm
        if cfg.support_hessian:  # a fifth, weighed as the support loss is
            s = (*s[:-1], s[-1] * cfg.shot / cfg.query)
            blocks[name] = add_blocks(blocks[name], s if len(s) == 1 else tuple(f[None] for f in s))
    return blocks


def merge(block: Block, rank: int) -> Block:
    """DIFFERS: the nearest sum of `rank` products in Frobenius norm (Van Loan, Pitsianis 1993).

    Rearranged, the sum of A_i(x)G_i is the sum of vec(A_i) vec(G_i)', whose truncated SVD is the
    best approximation; QR decompositions leave an SVD of r x r. One pair of a positive
    semi-definite sum is positive semi-definite.
    """
    if len(block) == 1 or not rank or len(block[0]) <= rank:
        return block
    rank = min(rank, *(f[0].numel() for f in block))
    A, G = (f.flatten(1).T.double() for f in block)  # (P*P, r), (O*O, r)
    (Q_a, R_a), (Q_g, R_g) = torch.linalg.qr(A), torch.linalg.qr(G)
    U, S, Vh = torch.linalg.svd(R_a @ R_g.T)
    A, G = Q_a @ U[:, :rank], Q_g @ (Vh[:rank].T * S[:rank])
    trace = A[:: block[0].shape[-1] + 1].sum(0)
    sign = torch.where(trace < 0, -1.0, 1.0)  # both factors positive, not both negative
    return tuple((f * sign).T.reshape(rank, *x.shape[1:]).to(x) for f, x in zip((A, G), block))


def times(block: Block, D: Tensor) -> Tensor:
    """The block times vec(D), in the shape of D (Eq. 24)."""
    if len(block) == 1:
        return (block[0] @ D[..., None])[..., 0]
    return (block[1] @ D @ block[0].mT).sum(0)


class Laplace(Posterior):
    """BomLA: mean mu_t and precision Lambda_t = lambda H_t + Lambda_{t-1} (Eq. 29)."""

    carries = ("mean", "blocks")

    def __init__(self, cfg: Config, theta: Params):
        super().__init__(cfg, theta)
        self.support_weight = cfg.shot / cfg.query
        self.mean = filled(theta, 0.0)  # mu_0
        self.blocks: dict[str, Block] = {}  # the precision, less Lambda_0

    def penalty(self, theta):
        """The last term of Eq. 8, 1/2 (theta - mu)' Lambda (theta - mu), and its gradient."""
        matrices = {name: to_matrix(theta, name) for name in layers_of(theta)}
        value, grads = 0.0, []
        for name, matrix in matrices.items():
            D = matrix.detach() - to_matrix(self.mean, name)
            # Lambda_0 has the authors' values. DIFFERS: times the identity, not a matrix of ones.
            product = D * (1e-2 if name.startswith("linear") else 1e-4)
            if name in self.blocks:
                product = product + times(self.blocks[name], D)
            value = value + 0.5 * (D * product).sum()
            grads.append(product)
        # back to the parameters' shapes
        return value, torch.autograd.grad(list(matrices.values()), theta.values(), grads)

    def absorb(self, theta, data, rng):
        """Lines 12 to 16 of Algorithm 1."""
        cfg, setting = self.cfg, data.setting
        index = sample_tasks(data, "train", cfg.hessian_tasks, cfg, rng)
        u = [torch.rand(len(index), cfg.way * each, generator=rng, device=index.device)
             for each in (cfg.shot, cfg.query)]
        parts = zip(*(v[share()].split(8) for v in (index, *u)))  # 8 tasks at a time
        batches = ((*fetch(data, some, cfg), *draws) for some, *draws in parts)
        a = setting.inner_rate if cfg.jacobian_rate is None else cfg.jacobian_rate
        alpha = theta["linear.bias"].new_tensor([setting.inner_rate])
        new = adapted_curvature(theta, batches, alpha, setting.inner_steps, a, cfg)
        self.mean = {n: v.detach().clone() for n, v in theta.items()}
        for name, block in new.items():
            finite = all(f.isfinite().all() for f in block)
            need(finite, f"{data.name}'s curvature in {name} is not finite; lower --outer-rate.")
            block = (*block[:-1], block[-1] * cfg.past_weight)  # lambda on one factor
            block = add_blocks(self.blocks[name], block) if name in self.blocks else block
            self.blocks[name] = merge(block, cfg.merge_rank)


# -------------------------------------------------------------------------------------- Variational
# BomVI: theta ~ N(mean, diag(variance)); the mean is what is called theta elsewhere. By local
# reparameterisation, not weights but pre-activations are sampled, each from its own normal
# distribution: independently at every image and location, though one weight serves them all. Batch
# norm's scale and shift are drawn for each image.


def noisy_layer(variance: Params, noise: Tensor):
    """A `layer` with parameters N(p, variance), each (T, ...). It uses up the noise (T, n)."""
    T, used = len(noise), 0

    def normal(h: Tensor) -> Tensor:
        """The next of the noise in the shape of h; channels-last, if of images."""
        nonlocal used
        part = noise[:, used : used + h.numel() // T]
        used += part.shape[1]
        if h.dim() == 3:
            return part.view(h.shape)
        return part.view(T, len(h), *h.shape[2:], -1).permute(1, 0, 4, 2, 3).flatten(1, 2)

    def noisy(p: Params, name: str, x: Tensor) -> Tensor:
        if name.startswith("norm"):
            x, drawn = F.batch_norm(x, None, None, training=True), []
            for n in (f"{name}.weight", f"{name}.bias"):
                mean, var = (v[n].flatten()[:, None, None] for v in (p, variance))
                drawn.append(mean + var.sqrt() * normal(x[..., :1, :1]))
            return x * drawn[0] + drawn[1]
        # DIFFERS: the mean comes from x, the variance from x^2; the authors' conv has x^2 in both.
        mean, var = layer(p, name, x), layer(variance, name, x * x)
        return mean + var.clamp(min=torch.finfo(x.dtype).tiny).sqrt() * normal(mean)

    return noisy


def room_for_noise(p: Params, x: Tensor) -> Tensor:
    """Memory (T, n) for the noise of a pass over x (T, B, ...): for each image a number for each
    conv output, scale, shift and logit."""
    filters, way = p["norm1.bias"].shape[-1], p["linear.bias"].shape[-1]
    each = filters * sum(side**2 + 2 for side in (28, 14, 7, 3)) + way
    return x.new_empty(len(x), x.shape[1] * each)


def fill(noise: Tensor, rngs: list) -> Tensor:
    """New noise, by a generator for each task: it does not depend on how tasks are grouped."""
    for part, rng in zip(noise, rngs):
        part.normal_(generator=rng)
    return noise


def gaussian_kl(mean, logvar, prior_mean, prior_logvar) -> Tensor:
    """KL(N(mean, e^logvar) || N(prior_mean, e^prior_logvar)), summed over dimensions."""
    ratio = (logvar - prior_logvar).exp() + (mean - prior_mean) ** 2 / prior_logvar.exp()
    return 0.5 * (ratio - 1 - logvar + prior_logvar).sum()


class Variational(Posterior):
    """BomVI, Algorithm 2: Adam trains mean (theta) and log-variance, which are the next prior."""

    decays = False  # Table 2
    carries = ("logvar", "prior_mean", "prior_logvar")

    def __init__(self, cfg: Config, theta: Params):
        super().__init__(cfg, theta)
        self.support_weight = cfg.shot / cfg.query
        # DIFFERS: Eq. 14 divided by N Q has KL / (N Q). The authors divide the KL by tasks and
        # samples, too: by 75 x 32 x 20 in their N-athlons, which we take everywhere (by 500 in
        # their Omniglot sequence).
        named = {"paper": 1 / (cfg.way * cfg.query), "authors": 1 / (75 * 32 * 20)}
        self.kl_weight = named.get(cfg.kl_weight, cfg.kl_weight)
        self.logvar = leaves(filled(theta, cfg.initial_logvar))
        self.prior_mean = {n: v.detach().clone() for n, v in theta.items()}
        self.prior_logvar = filled(theta, math.log(cfg.first_variance))

    def parameters(self, theta):
        logvars = dict(params=self.logvar.values(), lr=self.cfg.logvar_rate)
        return [*super().parameters(theta), logvars]

    def variance(self) -> Params:
        return {n: v.detach().exp() for n, v in self.logvar.items()}

    def expected_loss(self, mean: Params, x: Tensor, y: Tensor, rngs):
        """E_q of the cross-entropy by S samples, summed over the tasks of mean (T, ...); and its
        gradients in mean and logvar. One sample at a time, to save memory."""
        shared = self.variance()
        mean, variance = (leaves({n: v.contiguous() for n, v in p.items()})  # once for S passes
                          for p in (mean, spread(shared, len(x))))
        params, S = [*mean.values(), *variance.values()], self.cfg.mc_samples
        total, sums, noise = 0.0, (), room_for_noise(mean, x)
        for _ in range(S):
            logits = network(mean, x, noisy_layer(variance, fill(noise, rngs)))
            loss = cross_entropy(logits, y).sum() / S
            grads = torch.autograd.grad(loss, params)
            sums = torch._foreach_add(sums, grads) if sums else grads  # one kernel for all
            total = total + loss.detach()
        # d variance / d logvar = variance
        in_logvar = [g.sum(0) * v for g, v in zip(sums[len(mean) :], shared.values())]
        return total, sums[: len(mean)], in_logvar

    def gradient(self, theta, batch, alpha, k, rngs):
        """Eq. 14's expected losses; the mean adapts by gradients at the mean (Eqs. 33, 34)."""
        x_s, y_s, x_q, y_q = batch
        T, weight, queries = len(x_s), self.support_weight, []
        adapted, _ = adapt(spread(theta, T), x_s, y_s, alpha, k, second_order=True)
        for part in chunks(T, x_s.device):
            mean = leaves(adapted, part)
            queries.append(self.expected_loss(mean, x_q[part], y_q[part], rngs[part]))
        losses, in_adapted, in_logvar = zip(*queries)
        support_loss, in_mean, in_logvar_s = self.expected_loss(spread(theta, T), x_s, y_s, rngs)
        cotangents = [torch.cat(g) for g in zip(*in_adapted)]
        grads = torch.autograd.grad(adapted.values(), theta.values(), cotangents)
        grads = [g + weight * s.sum(0) for g, s in zip(grads, in_mean)]
        in_logvar = map(sum, zip(*in_logvar))
        grads += [q + weight * s for q, s in zip(in_logvar, in_logvar_s)]
        return sum(losses) + weight * support_loss, grads

    def penalty(self, theta):
        """The KL of Eq. 14, weighted."""
        kl = sum(gaussian_kl(theta[n], self.logvar[n], self.prior_mean[n], self.prior_logvar[n])
                 for n in theta) * self.kl_weight
        return kl.detach(), torch.autograd.grad(kl, [*theta.values(), *self.logvar.values()])

    def absorb(self, theta, data, rng):
        """The posterior is the next prior, its variance divided by lambda. The paper has no lambda
        here, so 1. Unlike BomLA's it weighs older datasets more: by lambda^2, lambda^3, ..."""
        log_lambda = math.log(self.cfg.past_weight)
        self.prior_mean = {n: v.detach().clone() for n, v in theta.items()}
        self.prior_logvar = {n: v.detach() - log_lambda for n, v in self.logvar.items()}

    def predict(self, adapted, x, rngs):
        """At the adapted mean, as the authors do; and the mean probability of S samples."""
        variance, noise = spread(self.variance(), len(x)), room_for_noise(adapted, x)
        samples = [network(adapted, x, noisy_layer(variance, fill(noise, rngs))).log_softmax(-1)
                   for _ in range(self.cfg.mc_samples)]
        sampled = torch.stack(samples).logsumexp(0) - math.log(len(samples))
        return super().predict(adapted, x, rngs) | {"sampled_": sampled}


# ------------------------------------------------------------------------------------------ Methods
# A source gives the i-th meta-batch of a stage, from the datasets that have arrived, as a list of
# (dataset, indices of images (T, N, K+Q)).


def from_newest(arrived: list[Dataset], i: int, cfg: Config, seed: int):
    rng = stream(arrived[-1].images.device, seed, "train", len(arrived) - 1, i)
    return [(arrived[-1], sample_tasks(arrived[-1], "train", cfg.meta_batch, cfg, rng))]


def from_all(arrived, i, cfg, seed):
    """Train-On-Everything: all datasets in turn, each round in random order."""
    d, M, owners = len(arrived), cfg.meta_batch, []
    for n in range(i * M, (i + 1) * M):
        order = torch.randperm(d, generator=stream("cpu", seed, "plan", d - 1, n // d))
        owners.append(int(order[n % d]))
    rng = stream(arrived[-1].images.device, seed, "train", d - 1, i)
    return [(data, sample_tasks(data, "train", owners.count(j), cfg, rng))
            for j, data in enumerate(arrived) if j in owners]


def from_buffer(arrived, i, cfg, seed):
    """Follow-The-Meta-Leader: uniformly from a buffer of J M tasks of each dataset so far, the
    newest's from the first iteration. Nothing is stored: task n is drawn anew, from seed n.

    DIFFERS: so it rehearses all old data. The paper's retains "the online characteristic"
    (Section 6.3); how, is not public.
    """
    starts = [0, *itertools.accumulate(d.setting.iterations * cfg.meta_batch for d in arrived)]
    plan, batch = stream("cpu", seed, "plan", len(arrived) - 1, i), []
    for n in torch.randint(starts[-1], (cfg.meta_batch,), generator=plan).tolist():
        j = sum(n >= start for start in starts[1:])  # its dataset
        rng = stream(arrived[j].images.device, seed, "task", j, n - starts[j])
        batch.append((arrived[j], sample_tasks(arrived[j], "train", 1, cfg, rng)))
    return batch


class Method(NamedTuple):
    label: str
    source: Callable  # where its meta-batches come from
    posterior: type[Posterior]  # what it carries forward beside theta
    from_scratch: bool = False  # each stage trains anew, for as long as all so far together


# A new method is a Posterior or a source of its own, and a row here.
METHODS = {
    "maml": Method("Sequential MAML", from_newest, Posterior),
    "bomla": Method("BomLA", from_newest, Laplace),
    "bomvi": Method("BomVI", from_newest, Variational),
    "toe": Method("Train-On-Everything", from_all, Posterior, from_scratch=True),
    "ftml": Method("Follow-The-Meta-Leader", from_buffer, Posterior),
}


def meta_step(theta: Params, posterior: Posterior, optimiser, batch, cfg: Config, rng_of) -> Tensor:
    """Lines 7 to 10 of Algorithm 1; returns the objective (Eqs. 2, 8, 14). rng_of(m) makes the
    generator of task m."""
    params = [p for group in optimiser.param_groups for p in group["params"]]
    sums, before = [params[0].new_zeros(()), *map(torch.zeros_like, params)], 0
    groups = defaultdict(list)  # by k: tasks with the same k adapt together
    for data, index in batch:
        rngs = [rng_of(m) for m in range(before, before + len(index))[share(before)]]
        if rngs:
            tasks = fetch(data, index[share(before)], cfg)
            alpha = tasks[0].new_full((len(rngs),), data.setting.inner_rate)
            groups[data.setting.inner_steps].append((*tasks, alpha, rngs))
        before += len(index)
    for k, parts in groups.items():
        *tensors, rngs = zip(*parts)
        *tasks, alpha = map(torch.cat, tensors)
        loss, grads = posterior.gradient(theta, tasks, alpha, k, sum(rngs, []))
        sums = [a + b for a, b in zip(sums, (loss, *grads))]
    loss, *grads = (v / cfg.meta_batch for v in sum_over_ranks(sums))
    prior, prior_grads = posterior.penalty(theta)
    for p, g, h in zip(params, grads, prior_grads):
        p.grad = g + h
    optimiser.step()
    return loss + prior


# --------------------------------------------------------------------------------------- Evaluation


def evaluate(theta: Params, posterior: Posterior, data: Dataset, cfg: Config, seed: int) -> dict:
    """Scores on tasks of unseen classes, the same tasks for every method."""
    device, s, found, scores = data.images.device, data.setting, defaultdict(list), {}
    rng = stream(device, seed, "evaluate", data.name)
    index = sample_tasks(data, cfg.split, cfg.eval_tasks, cfg, rng)
    for some in torch.arange(cfg.eval_tasks)[share()].split(4 if device.type == "cpu" else 32):
        x_s, y_s, x_q, y_q = fetch(data, index[some], cfg)
        rngs = [stream(device, seed, "evaluate", data.name, m) for m in some.tolist()]
        start = leaves(spread(theta, len(some)))
        adapted, _ = adapt(start, x_s, y_s, x_s.new_tensor([s.inner_rate]), s.eval_steps)
        for part in chunks(len(some), device):
            p = {n: v[part].detach() for n, v in adapted.items()}
            for prefix, log in posterior.predict(p, x_q[part], rngs[part]).items():
                right = (log.argmax(-1) == y_q[part]).to(log)
                nll = -log.gather(-1, y_q[part][..., None])[..., 0]
                found[prefix].append(torch.stack([right, nll]).mean(-1))  # (2, T)
    for prefix, parts in found.items():
        values = parts[0].new_zeros(2, cfg.eval_tasks)
        values[:, share()] = torch.cat(parts, 1)
        accuracy, nll = sum_over_ranks([values])[0].double().cpu()
        need(nll.isfinite().all(), f"adapting to {data.name} diverged; try a smaller --inner-rate.")
        ci95 = 1.96 * accuracy.std(correction=min(1, len(nll) - 1)) / len(nll) ** 0.5
        for name, value in dict(accuracy=accuracy.mean(), ci95=ci95, nll=nll.mean()).items():
            scores[prefix + name] = value.item()
    return scores


# ---------------------------------------------------------------------------------------------- Run

CHECKPOINT_EVERY = 100  # iterations


class Job(NamedTuple):
    method: str
    variant: str  # the method, with lambda if not the experiment's: "bomla@1000"
    seed: int
    cfg: Config

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed}"


class Run:
    """A job on its way through the datasets. All that is random is drawn by a `stream` of the seed
    and its place in the run, so a resumed run repeats the unbroken one."""

    def __init__(self, job, sequence, judges, facts, out, progress, device="cpu"):
        self.job, self.cfg, self.out, self.device = job, job.cfg, out, torch.device(device)
        self.sequence, self.judges = sequence, judges  # datasets to learn and to evaluate on
        self.progress = progress  # takes the fraction done; returns True to stop
        self.method, self.learned = METHODS[job.method], [facts_of(d) for d in sequence]
        who = dict(method=job.method, variant=job.variant, seed=job.seed)
        # facts are in every row of the record; settings must stay the same in a resumed run
        self.facts = facts | who | dict(datasets=[d.name for d in judges], stages=len(sequence))
        self.settings = who | dataclasses.asdict(job.cfg)
        self.settings |= {key: facts[key] for key in ("experiment", "start_from")}
        J = [d.setting.iterations for d in sequence]  # of each stage
        self.iterations = list(itertools.accumulate(J)) if self.method.from_scratch else J
        self.theta = self.initial(0)
        self.posterior = self.method.posterior(job.cfg, self.theta)
        self.stage, self.iteration, self.rows, self.clock = 0, 0, [], time.time()

    def initial(self, stage):
        return init_params(self.cfg, stream("cpu", self.job.seed, "init", stage), self.device)

    def go(self) -> bool:
        """Algorithms 1 and 2; False if asked to stop before the end."""
        for t in range(self.stage, len(self.sequence)):  # line 3: a dataset arrives
            data, J, seed = self.sequence[t], self.iterations[t], self.job.seed
            if self.iteration == 0:
                if self.method.from_scratch and t > 0:
                    self.theta = self.initial(t)
                self.optimiser = torch.optim.Adam(self.posterior.parameters(self.theta))
            for i in range(self.iteration, J):  # lines 4 to 11: meta-training on it
                # Train-On-Everything: the newest dataset's decay, along its longer J
                falls = sum(i >= f * J for f in data.setting.decay) if self.posterior.decays else 0
                self.optimiser.param_groups[0]["lr"] = self.cfg.outer_rate * 0.1**falls
                batch = self.method.source(self.sequence[: t + 1], i, self.cfg, seed)
                rngs = functools.partial(stream, self.device, seed, "noise", t, i)
                loss = meta_step(self.theta, self.posterior, self.optimiser, batch, self.cfg, rngs)
                self.iteration = i + 1
                if self.after_iteration(loss):
                    return False
            rng = stream(self.device, seed, "absorb", t)
            self.posterior.absorb(self.theta, data, rng)  # lines 12 to 16
            self.stage, self.iteration = t + 1, 0
            self.save()
        return True

    def after_iteration(self, loss) -> bool:
        """Evaluate and save if it is time to; True to stop."""
        t, i = self.stage, self.iteration
        data, J = self.sequence[t], self.iterations[t]
        costs = [n * (1 + d.setting.inner_steps) for n, d in zip(self.iterations, self.sequence)]
        stop = self.progress((sum(costs[:t]) + costs[t] * i / J) / sum(costs))
        due = i % self.cfg.eval_every == 0 or i in (data.setting.iterations, J)  # toe's J is longer
        if due or stop or i % CHECKPOINT_EVERY == 0:
            finite = all(v.isfinite().all() for v in (loss, *self.theta.values()))
            need(finite, f"the loss of {self.job.name} became {loss.item()} on {data.name} by "
                 f"iteration {i}; try a smaller --outer-rate.")
            where = dict(stage=t + 1, iteration=i, iterations=J, newest=data.setting.iterations)
            for judge in (d for d in self.judges if due and d.images is not None):
                scores = evaluate(self.theta, self.posterior, judge, self.cfg, self.job.seed)
                where |= dict(evaluated=judge.name, seconds=round(time.time() - self.clock, 1))
                self.rows.append(self.facts | where | scores)
            if i < J:
                self.save()
        return stop and i < J

    def save(self):
        """A checkpoint, with the one before it kept, and the record."""
        same_on_all_ranks(self.theta)
        state = dict(settings=self.settings, learned=self.learned, stage=self.stage,
                     iteration=self.iteration, rows=self.rows, seconds=time.time() - self.clock,
                     theta=self.theta, posterior=self.posterior.state(),
                     optimiser=self.optimiser.state_dict())
        if RANK == 0:
            with replacing(self.out / "checkpoint.pt", self.out / "checkpoint.before.pt") as file:
                torch.save(state, file)
        self.write_record()

    def write_record(self):
        if RANK == 0:
            with replacing(self.out / "record.jsonl") as file:
                file.write("".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def load(self, state):
        self.begin_at(state)
        self.stage, self.iteration = state["stage"], state["iteration"]
        newer = {key: self.facts[key] for key in ("data", "settings", "datasets", "stages")}
        self.rows = [row | newer for row in state["rows"]]  # the sequence may have grown
        self.clock = time.time() - state["seconds"]
        self.optimiser = torch.optim.Adam(self.posterior.parameters(self.theta))
        self.optimiser.load_state_dict(state["optimiser"])
        for moments in self.optimiser.state.values():
            moments["step"] = moments["step"].cpu()  # where Adam reads it without waiting

    def begin_at(self, state):
        self.theta = state["theta"]
        self.posterior.load(state["posterior"])

    def resume(self, fresh=False, first=None):
        """From the newest checkpoint that can be read; else from the start, or from `first`, the
        state of another run."""
        if first:  # before anything is deleted
            self.begin_at(first)
        files = [*self.out.glob("checkpoint.*"), *self.out.glob("record.*")] if RANK == 0 else []
        for path in files:
            if fresh or path.suffix == ".tmp":
                path.unlink()
        for path, state in checkpoints(self.out, self.device):
            self.compare(state)
            self.load(state)
            latest = self.out / "checkpoint.pt"
            if RANK == 0 and path != latest and latest.exists():  # not to be kept as "before"
                os.replace(latest, self.out / "checkpoint.damaged")
            self.write_record()
            return
        left = [path.name for path in files if path.exists()]
        need(not left, f"{self.out} holds results ({', '.join(left)}) but no readable checkpoint; "
             f"use another --out, or --fresh with --methods {self.job.method} to delete them.")

    def compare(self, state):
        """Refuse to go on from a run that this one does not continue."""
        old, new = (",".join(d["name"] for d in some) for some in (state["learned"], self.learned))
        need(f"{new},".startswith(f"{old},"), f"{self.out} holds a run of {old}, which {new} does "
             "not continue; use another --out.")
        settings = dataclasses.asdict(Config()) | state["settings"]  # newer options: the default
        pairs = [("", settings, self.settings)]
        pairs += [(f"{b['name']}'s ", a, b) for a, b in zip(state["learned"], self.learned)]
        differ = [f"{of}{key} was {was.get(key)!r}, is {now.get(key)!r}" for of, was, now in pairs
                  for key in was | now if was.get(key) != now.get(key)]
        need(not differ, f"{self.out} holds a run of other settings ({'; '.join(differ)}); go back "
             "to them, or use another --out.")
        revision = state["rows"][-1]["revision"] if state["rows"] else self.facts["revision"]
        if revision != self.facts["revision"]:
            say(f"{self.job.name}: the program has changed since {revision}; going on.")


def facts_of(data: Dataset) -> dict:
    """What identifies a dataset and its training."""
    options = {name: getattr(data.setting, name) for name in PER_DATASET}
    return dict(name=data.name, kind=data.kind, checksum=data.checksum, **options)


def checkpoints(folder: Path, device="cpu", spare=True):
    """The checkpoints of a run that can be read, newest first: path, state. Without `spare` a
    damaged one is refused: the one before it may be an earlier dataset's."""
    for path in (folder / "checkpoint.pt", folder / "checkpoint.before.pt"):
        there = RANK == 0 and path.is_file()
        content = from_first_rank(path.read_bytes() if there else b"", device)
        if not (content or there):
            continue
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:  # torch checks no checksums
                need(not archive.testzip(), "a checksum in it is wrong")
            state = torch.load(io.BytesIO(content), weights_only=True, map_location=device)
            kinds = dict(settings=dict, learned=list, stage=int, iteration=int, rows=list,
                         seconds=float, theta=dict, posterior=dict, optimiser=dict)
            is_run = all(isinstance(state[key], kind) for key, kind in kinds.items())
            need(is_run, "it is not of a run")
        except Exception as error:  # torch raises almost anything on bad bytes
            damaged = f"{path} is damaged ({brief(error)})"
            need(spare, f"{damaged}; name another run, or delete it to use the one before, if any.")
            say(f"boml: {damaged}.")
        else:
            yield path, state


@contextlib.contextmanager
def replacing(path: Path, keep: Path | None = None):
    """A file that replaces path once all of it is on disk."""
    new = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(new, path)
    except (OSError, RuntimeError) as error:  # the latter is torch's, on a full disk
        raise OSError(f"{path} cannot be written ({brief(error)}); nothing was replaced.")
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(folder: Path):
    """The folder for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"another process is at work in {folder}; wait, or use another --out.")
        yield


# ------------------------------------------------------------------------------------- Command line
# One run. `bash run.sh` starts several, one for each method, seed and lambda, side by side.


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(f"{message}; see --help.")


def several(kind):
    def list(text):  # argparse says "invalid list value"
        return tuple(map(kind, text.split(",")))

    return list


def weight(text):
    return text if text in ("paper", "authors") else float(text)


def options():
    parser = Parser("boml.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name, text, **how):
        parser.add_argument(flag(name), help=text, **how)

    parser.add_argument("command", choices=EXPERIMENTS)
    add("method", "default: %(default)s", choices=METHODS, default="bomla")
    add("seed", "default: %(default)s", type=int, default=0)
    add("sequence", "datasets in order, names or .npz files, comma-separated", type=several(str))
    add("schedule", "default: paper with a GPU, else cpu", choices=SCHEDULES)
    add("data", "folder of <name>.npz (default: %(default)s)", type=Path, default=HERE / "data")
    add("out", "folder of results (default: %(default)s)", type=Path, default=HERE / "runs")
    add("device", "default: cuda if there is one", choices=("cpu", "cuda"))
    add("fresh", "delete the results of this run and start over", action="store_true")
    add("start_from", "folder of a run whose parameters and posterior to begin with", type=Path)
    for name, text in PER_DATASET.items():
        kind = Setting.__annotations__[name]
        add(name, f"{text}; one for all datasets, or one for each", type=several(kind))
    special = dict(kl_weight=weight, jacobian_rate=float)
    for field in dataclasses.fields(Config):
        how = dict(type=special.get(field.name, field.type), choices=field.metadata["choices"])
        if field.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        text = f"{field.metadata['help']} (default: {field.default}, or the experiment's)"
        add(field.name, text, **how)
    return parser


def parse(argv):
    """The command line, checked; with (name, Setting) of each dataset as `sequence`, and its run as
    `job`."""
    args = options().parse_args(argv)
    check("seed", args.seed, 0)
    experiment, gpu = EXPERIMENTS[args.command], torch.cuda.is_available()
    args.device = args.device or ("cuda" if gpu else "cpu")
    need(gpu or args.device == "cpu", "CUDA is not available on this machine; use --device cpu.")
    args.schedule = args.schedule or ("paper" if args.device == "cuda" else "cpu")
    datasets = [name.rstrip("/") for name in args.sequence or experiment.sequence]
    need(datasets, "run needs --sequence: datasets in order, separated by commas.")
    need(args.command != "omniglot" or len(datasets) == 1, "omniglot takes one dataset; name one.")
    values = SCHEDULES[args.schedule] | experiment.every
    if args.schedule == "cpu" and len(experiment.cpu.get("iterations", ())) in (1, len(datasets)):
        values |= experiment.cpu  # else --sequence has another length
    usual = experiment.past_weight.get(args.method, Config.past_weight)
    given = {key: value for key, value in vars(args).items() if value is not None
             and (key in PER_DATASET or hasattr(Config, key))}
    values |= {"past_weight": usual} | given
    settings = [DATASETS.get(name, OWN) for name in datasets]
    for key in PER_DATASET:
        each = values.pop(key, [getattr(setting, key) for setting in settings])
        need(len(each) in (1, len(datasets)), f"{flag(key)} has {len(each)} values for "
             f"{len(datasets)} datasets; give one for all, or one for each.")
        for j, value in enumerate(each if len(each) > 1 else each * len(datasets)):
            check(key, value, 0 if key == "inner_rate" else 1)
            settings[j] = settings[j]._replace(**{key: value})
    args.sequence, cfg = list(zip(datasets, settings)), Config(**values)
    own_lambda = "" if cfg.past_weight == usual else f"@{cfg.past_weight:g}"
    args.job = Job(args.method, args.method + own_lambda, args.seed, cfg)
    args.folder = args.out / args.command / args.job.name
    method = METHODS[args.method]
    need(not args.start_from or not method.from_scratch, f"--start-from is not for {args.method}, "
         "whose stages start from scratch; leave one out.")
    need(not own_lambda or method.posterior is not Posterior, f"--past-weight is not for "
         f"{args.method}, which has no posterior; leave one out.")
    return args


def begun(args) -> tuple[list[dict], int]:
    """What identifies the datasets of the run so far, and how many of them it has learned."""
    _, state = next(checkpoints(args.folder), (None, None))
    return (state["learned"], state["stage"]) if state and not args.fresh else ([], 0)


def load_sequence(args, device="cpu"):
    """The datasets of a run; of those that it has learned, the images may be gone."""
    job, sequence, (listed, stage) = args.job, [], begun(args)
    known = {each["name"]: each for each in listed[:stage]}  # learned
    for name, setting in args.sequence:
        path = Path(name) if name.endswith(".npz") else args.data / f"{name}.npz"
        if path.stem in known and not path.exists():
            facts = known[path.stem]
            setting = setting._replace(**{field: facts[field] for field in PER_DATASET})
            data = Dataset(path.stem, facts["kind"], [], setting, None, None, {}, facts["checksum"])
            need(METHODS[job.method].source is from_newest, f"{job.method} trains on all datasets, "
                 f"and {data.name} is gone; leave {job.method} out.")
        else:
            need(name in DATASETS or path.exists(), f"{name!r} is neither one of "
                 f"{', '.join(DATASETS)} nor, for run.sh, a folder.")
            data = load_dataset(path, setting, device)
            need(name in DATASETS or data.kind == "own", f"{path} is not of a folder of one's own; "
                 f"use --data {path.parent} --sequence {path.stem}.")
            check_dataset(data, job.cfg)
        need(data.name not in [d.name for d in sequence], f"two datasets are named {data.name}; "
             "leave out or rename one.")
        sequence.append(data)
    return sequence


def starting_point(args):
    """The state that --start-from names, unless the run has begun already."""
    folder = args.start_from
    if not folder:
        return None
    another = folder.resolve() != args.folder.resolve()
    if another and not args.fresh and any(checkpoints(args.folder)):
        return None
    none = {"settings": {}, "iteration": 0}
    _, state = next(checkpoints(folder, args.device, spare=False), (None, none))
    wanted = dataclasses.asdict(args.job.cfg) | {"method": args.method}
    same = [state["settings"].get(key) == wanted[key]
            for key in ("method", "way", "channels", "filters")]
    need(another and all(same) and state["iteration"] == 0, f"--start-from {folder} is not the "
         f"folder of another run of {args.method} with the same --way, --channels and --filters "
         "that has come to the end of a dataset; name one.")
    return state


def shared_facts(args, sequence):
    """What all records of a table share; their settings as a hash."""
    start = [str(args.start_from.resolve())] if args.start_from else []
    cfg = dataclasses.replace(args.job.cfg, past_weight=Config.past_weight)
    settings = repr((cfg, [facts_of(d) for d in sequence], *start)).encode()
    kinds = " and ".join(sorted({d.kind for d in sequence}, reverse=True))
    return dict(experiment=args.command, schedule=args.schedule, data=kinds, way=cfg.way,
                split=cfg.split, settings=hashlib.md5(settings).hexdigest()[:8],
                revision=revision(), start_from="".join(start))


def revision():
    with contextlib.suppress(OSError):
        command = ["git", "-C", HERE, "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def heed(handler):
    """Install a handler for SIGINT, SIGTERM and SIGHUP, unless they are ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def reporter(name):
    """A progress callback: a line every minute; True once a signal has asked to stop."""
    asked, begun, said = [], None, time.time() - 50  # a first line after 10 s

    def stop(number, _):
        asked.append(number)
        signal.signal(number, signal.default_int_handler)  # the second time, at once

    def progress(done):
        nonlocal begun, said
        now = time.time()
        begun = begun or (now, done)  # a resumed run does not begin at 0
        if now > said + 60 and done > begun[1]:
            said, left = now, (now - begun[0]) * (1 - done) / (done - begun[1])
            end = time.strftime("%a %H:%M", time.localtime(now + left))
            say(f"{name}: {done:.0%}, ends {end}")
        return bool(asked)

    if not TORCHRUN:  # whose ranks stop as one
        heed(stop)
    return progress


def work(args, progress) -> bool:
    """The run; False if it was stopped."""
    sequence = judges = load_sequence(args, args.device)
    facts, job = shared_facts(args, sequence), args.job
    if args.command == "omniglot":
        sequence, *judges = task_sequence(sequence[0], job.cfg, job.seed)
    run = Run(job, sequence, judges, facts, args.folder, progress, args.device)
    with lock(args.folder) if RANK == 0 else contextlib.nullcontext():
        run.resume(args.fresh, starting_point(args))
        ended = run.go()
    print(f"{job.name}: {facts['data']} data, {args.schedule} schedule; {args.folder}")
    for judge in judges:
        ends = [f"{100 * row['accuracy']:.1f}" for row in run.rows
                if row["evaluated"] == judge.name and row["iteration"] == row["iterations"]]
        print(f"  % right on {judge.name} at the end of each stage: {' '.join(ends)}", flush=True)
    return ended


def main(argv):
    args = parse(argv)
    if TORCHRUN:
        start_ranks(args)
    if not work(args, reporter(args.job.name)):
        raise KeyboardInterrupt
    if TORCHRUN:
        torch.distributed.barrier()
        os._exit(0)  # skips Python's clean-up, where torch sometimes aborts


DISK_FAILED = 3  # exit status of a run; no other is started then


def one_sentence(function, *args):
    """A mistake of the user or the machine ends in one sentence, not a traceback."""
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(errors="backslashreplace")  # names the terminal cannot show
    try:
        return function(*args)
    except (Problem, OSError, MemoryError, RuntimeError) as problem:
        full = "out of memory" in str(problem) or "allocate memory" in str(problem)
        if isinstance(problem, RuntimeError) and not full:
            raise  # an error of the program
        if isinstance(problem, (MemoryError, RuntimeError)):
            problem = f"not enough memory ({brief(problem)}); lower --meta-batch or --query."
        say(f"boml: {problem}")
        sys.exit(DISK_FAILED if isinstance(problem, OSError) and function is main else 2)
    except KeyboardInterrupt:
        say("\nboml: stopped; the same command, without --fresh, goes on from the checkpoint.")
        sys.exit(130)


if __name__ == "__main__":
    heed(signal.default_int_handler)  # raises KeyboardInterrupt
    one_sentence(main, sys.argv[1:])
