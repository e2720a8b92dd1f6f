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
"""Bayesian online meta-learning: few-shot learning on one dataset after another, without forgetting.

A reproduction of Yap, Ritter and Barber, "Addressing Catastrophic Forgetting in Few-Shot Problems", ICML 2021.
One module, read top to bottom:

    Configuration   the paper's Tables 1 and 2, the schedules, the experiments
    Data            datasets as classes of images, generated stand-ins, sampling of tasks
    Network         4 x (conv, batch norm, max-pool, ReLU), linear: a function of a dictionary of parameters
    Adaptation      SGD on the support set (Eq. 1), the second-order meta-gradient (Eq. 2)
    Laplace         BomLA: objective (Eq. 8), adapted Kronecker-factored curvature (Eqs. 11, 12, 25 to 29), merge
    Variational     BomVI: objective (Eq. 14), local reparameterisation, adaptation of the mean (Eqs. 33, 34)
    Evaluation      adapt to unseen classes, score the query set
    Run             the five methods in a table; Algorithms 1 and 2; record and checkpoint
    Report          summary, table, figures: drawn from the records
    Claims          what the paper says of its experiments, and whether the records bear it out
    Approximation   the curvature against the exact one of reference_numpy.py
    Command line    python boml.py triathlon --help

Measured on real data (cpu schedule, seeds 0 to 2, two CPU cores, torch 2.13.0; figures/triathlon/summary.json): accuracy on
Omniglot right after its stage -> after miniQuickDraw and CIFAR-FS: sequential MAML 82.8 -> 52.3 %, BomVI 76.8 -> 66.4 %,
BomLA 78.6 -> 81.0 %.
"""
from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a busy-waiting second thread is 15x slower on a shared core
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large tensors in huge pages, where the system has them: less to fault

import argparse, dataclasses, fcntl, hashlib, inspect, itertools, json, math, multiprocessing, re, signal
import subprocess, sys, time, traceback, zipfile
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import data_prep  # which obtains and packs the images, and draws the generated ones
from data_prep import Problem

# ----------------------------------------------------------------------------------------------- Configuration


@dataclass(frozen=True)
class Config:  # the defaults are the paper's schedule; each comment below is also the option's --help
    way: int = 5  # N, classes of a task
    shot: int = 1  # K, support images per class
    query: int = 15  # query images per class, in training and in evaluation
    channels: int = 3  # of the images; grey ones are repeated
    filters: int = 64  # of each conv layer
    meta_batch: int = 32  # M, tasks per meta-batch
    iterations: str = "5000"  # J, meta-training iterations per dataset, one value or one for each
    toe_longer: bool = False  # Train-On-Everything trains for as many as all datasets so far together
    outer_rate: float = 0.001  # Adam's learning rate
    decay: bool = True  # that rate falls as in Table 2 (never for BomVI)
    inner_rate: str = ""  # alpha, one value or one for each dataset; empty: each dataset's own (Table 2)
    inner_steps: str = ""  # k in meta-training, likewise
    eval_steps: str = ""  # k in meta-evaluation, likewise
    eval_tasks: int = 100  # tasks of each evaluation of each dataset
    eval_every: int = 500  # iterations between evaluations on every dataset of the sequence
    past_weight: float = 100.0  # lambda, on every past dataset's curvature; of several, each is run (BomLA)
    hessian_tasks: int = 5000  # tasks of the curvature of each dataset (BomLA)
    averaging: str = "averages"  # of the curvature over tasks: averages of factors, or products of factors (BomLA)
    jacobian_rate: str = ""  # of the adaptation's Jacobian; empty: the dataset's alpha, 1: the paper's, 0: none (BomLA)
    merge_rank: int = 1  # Kronecker pairs kept per layer; 0: all of them (BomLA)
    exact_labels: bool = False  # in the Fisher the expectation over the model's labels, not one draw (BomLA)
    support_hessian: bool = False  # add the curvature of the support loss, which Algorithm 1 leaves out (BomLA)
    mc_samples: int = 20  # S, Monte Carlo samples of the pre-activations (BomVI)
    initial_logvar: float = -10.0  # log-variance to start from; the paper has -5 in the N-athlons (BomVI)
    first_variance: float = 1.0  # of the prior before the first dataset, around zero (BomVI)
    logvar_rate: float = 0.001  # Adam's learning rate of the log-variances (BomVI)
    kl_weight: str = "authors"  # of the KL against mean losses: paper (1/80), authors (1/51200), or a number (BomVI)
    tasks: int = 230  # of the sequence, at most (omniglot)
    split: str = "test"  # classes to evaluate on: test, or val to choose settings by


class Setting(NamedTuple):  # Table 2, a row per dataset
    classes: tuple[int, int, int]  # for training, validation, test
    inner_rate: float  # alpha
    inner_steps: int  # k in meta-training
    eval_steps: int  # k in meta-evaluation
    decay: tuple[float, ...] = ()  # the outer rate falls x 0.1 at these fractions of J
    iterations: int = 0  # J, from the configuration
    turns: int = 1  # 4: each rotation by a quarter turn is a class of its own
    stand_in: str = ""  # the generated dataset that takes its place when it is not there


DATASETS = {
    "omniglot": Setting((1100, 100, 423), 0.4, 1, 3, turns=4, stand_in="generated_characters"),
    "mini_quickdraw": Setting((241, 52, 52), 0.2, 3, 5, (0.5,), stand_in="generated_doodles"),
    "cifar_fs": Setting((64, 16, 20), 0.1, 5, 10, (0.5,), stand_in="generated_textures"),
    "mini_imagenet": Setting((64, 16, 20), 0.1, 5, 10, (0.5,), stand_in="generated_scenes"),
    "vgg_flowers": Setting((66, 16, 20), 0.1, 5, 10, (0.2, 0.4, 0.6, 0.8), stand_in="generated_blossoms"),
    "aircraft": Setting((64, 16, 20), 0.1, 5, 10, (0.5,), stand_in="generated_aeroplanes"),
}
DATASETS |= {  # the generated ones: as those for which they stand in, but with classes of their own
    data.stand_in: data._replace(classes=classes or data.classes, turns=1, stand_in="") for data, classes in zip(
        DATASETS.values(), ((220, 40, 80), (200, 40, 60), (200, 40, 60), None, None, None))}
OWN = Setting((0, 0, 0), 0.1, 5, 10, (0.5,))  # of a person's own folder of images
SCHEDULES = {
    "paper": {},  # Config's defaults, Table 1
    # The same network, alpha, k and Adam, on fewer and smaller meta-batches; log-variances have less time to travel.
    "cpu": dict(query=5, meta_batch=4, iterations="300", toe_longer=True, eval_every=450, hessian_tasks=100,
                mc_samples=1, logvar_rate=0.005),
}


class Experiment(NamedTuple):
    sequence: str  # of datasets
    settings: dict = {}  # where it differs from the schedules,
    cpu: dict = {}  # and from the cpu schedule


EXPERIMENTS = {
    "triathlon": Experiment("omniglot,mini_quickdraw,cifar_fs", cpu=dict(iterations="250,150,450")),
    "pentathlon": Experiment("omniglot,cifar_fs,mini_imagenet,vgg_flowers,aircraft",
                             cpu=dict(iterations="150", toe_longer=False)),
    "omniglot": Experiment(  # Table 3: not a sequence of datasets, but of tasks of one
        "omniglot", dict(shot=5, channels=1, meta_batch=1, iterations="50", eval_every=50, inner_rate="0.1",
                         inner_steps="5", eval_steps="10", past_weight=0.01, hessian_tasks=1, mc_samples=5),
        dict(tasks=40, query=5, iterations="20", eval_every=20, eval_tasks=20, mc_samples=1, toe_longer=False)),
    "run": Experiment(""),  # any --sequence
}


def need(condition, sentence: str):
    if not condition:
        raise Problem(sentence)


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def number(field: str, text: str, kind=float):
    try:
        return kind(text)
    except ValueError:
        raise Problem(f"{option(field)}: {text!r} is not a {'whole ' * (kind is int)}number.")


# -------------------------------------------------------------------------------------------------------- Data
# data_prep.py packs every real dataset into data/<name>.npz: images (n, 28, 28[, 3]) uint8, labels (n,) sorted,
# names (classes,). A dataset lives on the device as bytes; a meta-batch becomes float when it is sampled.

SPLITS = {  # the published ones: validation and test, all other classes are for training
    "cifar_fs": (  # Bertinetto et al. 2019
        "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle otter sea "
        "shark television tractor",
        "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail sweet_pepper "
        "table telephone wardrobe whale woman worm",
    ),
    "mini_imagenet": (  # Ravi and Larochelle 2017
        "n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 n03075370 n03417042 "
        "n03535780 n03584254 n03770439 n03773504 n03980874 n09256479",
        "n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 n02443484 n02871525 "
        "n03127925 n03146219 n03272010 n03544143 n03775546 n04146614 n04149813 n04418357 n04522168 n07613480",
    ),
}
ALPHABETS = (  # of the Omniglot task sequence, Appendix C.4
    "Anglo-Saxon_Futhorc Arcadian Blackfoot_(Canadian_Aboriginal_Syllabics) Cyrillic Ge_ez Glagolitic N_Ko",
    "Atemayar_Qelisayer Futurama Greek Mkhedruli_(Georgian) Syriac_(Estrangelo) Syriac_(Serto) Tagalog Tibetan",
)


class Dataset(NamedTuple):
    name: str
    kind: str  # "real", "generated" or "own"
    names: list[str]  # of its classes
    setting: Setting
    images: Tensor  # (n, C, 28, 28) uint8, sorted by class
    first: Tensor  # (classes,) index of each class's first image
    count: Tensor  # (classes,) its number of images
    splits: dict[str, Tensor]  # train, val, test: indices of classes
    most: int  # the largest count
    mark: str = ""  # a checksum of its images
    alphabet: Tensor | None = None  # (classes,) where the classes of a task are to come from one alphabet


def load_dataset(name: str, folder: Path, device="cpu", cfg=Config()) -> Dataset:
    """data/<name>.npz, a generated dataset drawn from memory, or a person's own folder, as classes and their split."""
    kind, setting = "generated" if name in data_prep.DRAW else "real", DATASETS.get(name, OWN)
    if kind == "generated":
        pictures, labels = zip(*data_prep.DRAW[name](np.random.default_rng(0), sum(setting.classes)))
        images, labels = np.stack(pictures), np.array(labels)
        names = [f"{c // 10:02d}/{c % 10}" for c in range(1 + labels[-1])]
    elif name in DATASETS:
        images, labels, names, _ = data_prep.read_npz(folder / f"{name}.npz")
    else:
        kind, (images, labels, names) = "own", data_prep.read_folder(Path(name), "L" if cfg.channels == 1 else "RGB")
        name, n = Path(name).resolve().name, len(names)
        name += " (own)" * (name in DATASETS)
        test = max(n // 5, cfg.way)  # a fifth, and a sixth for validation where that leaves enough for training
        val = max(0, min(n // 6, n - test - cfg.way))
        setting = setting._replace(classes=(max(n - test - val, 0), val, min(test, n)))
    images = images.reshape(len(images), 28, 28, -1)
    count = np.bincount(labels, minlength=len(names))
    splits = split_classes(name, list(names), setting.classes)
    on_device = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device)
    return Dataset(
        name, kind, list(names), setting, on_device(images.transpose(0, 3, 1, 2)), on_device(np.cumsum(count) - count),
        on_device(count), {s: on_device(np.array(c, int)) for s, c in splits.items()}, int(count.max()),
        hashlib.md5(np.ascontiguousarray(images)).hexdigest()[:8],
    )


def split_classes(name: str, names: list[str], sizes: tuple[int, int, int]) -> dict[str, list[int]]:
    """The published split where there is one, else at random: in the order of the names' md5, the same everywhere."""
    if name in SPLITS:
        parts = dict(zip(("val", "test"), (part.split() for part in SPLITS[name])))
        parts["train"] = [n for n in names if n not in parts["val"] + parts["test"]]
    else:
        a, b, c = sizes
        shuffled = sorted(names, key=lambda n: hashlib.md5(n.encode()).digest())
        parts = {"train": shuffled[:a], "val": shuffled[a : a + b], "test": shuffled[a + b : a + b + c]}
    found = tuple(len(set(parts[s]) & set(names)) for s in ("train", "val", "test"))
    need(found == sizes, f"{name} splits into {found} classes for training, validation and test, "
         f"not {sizes}; delete its file and make it again with: bash run.sh data")
    return {s: sorted(names.index(n) for n in part) for s, part in parts.items()}


def given_settings(cfg: Config, n: int) -> list[dict]:
    """Of n datasets the settings that the configuration gives, with one value for all or one for each."""
    given = [{} for _ in range(n)]
    for field in ("iterations", "inner_rate", "inner_steps", "eval_steps"):
        text = getattr(cfg, field)
        values = [number(field, v, float if field == "inner_rate" else int) for v in text.split(",") if v]
        need(len(values) in (1, n, 0 if field != "iterations" else 1), f"{option(field)} {text} has {len(values)} "
             f"values; give one, or one for each of the {n} datasets.")
        need(all(0 < v < math.inf for v in values), f"{option(field)} {text}: it must be above 0.")
        for own, v in zip(given, values * n if len(values) == 1 else values):
            own[field] = v
    return given


def load_sequence(names: list[str], cfg: Config, folder: Path, device="cpu") -> list[Dataset]:
    """These datasets; a generated one stands in, under its own name, for each that is not in the folder."""
    names = [n if (folder / f"{n}.npz").exists() else DATASETS.get(n, OWN).stand_in or n for n in names]
    sequence = [load_dataset(n, folder, device, cfg) for n in names]
    sequence = [d._replace(setting=d.setting._replace(**own)) for d, own in zip(sequence, given_settings(cfg, len(names)))]
    labels = [d.name for d in sequence]
    need(len(set(labels)) == len(labels), f"--sequence: two of {', '.join(labels)} have the same name; rename a folder.")
    for data in sequence:
        colours = data.images.shape[1]
        need(colours in (1, cfg.channels), f"{data.name} has {colours} channels; use --channels {colours}.")
        fewest, smallest = int(data.count.min()), data.names[int(data.count.argmin())]
        need(fewest > cfg.shot, f"{data.name} has a class of {fewest} images, {smallest}; use --shot {fewest - 1} or fewer.")
        need(fewest >= cfg.shot + cfg.query, f"{data.name} has a class of {fewest} images, {smallest}, too few for "
             f"{cfg.shot} shot + {cfg.query} queries; use --query {fewest - cfg.shot} or fewer.")
        for split in ("train", cfg.split):
            classes = len(data.splits[split]) * data.setting.turns
            more = f", or give it {2 * cfg.way} classes or more" * (data.kind == "own")
            need(cfg.way <= classes, f"{data.name} has {classes} of its {len(data.names)} classes for {split}, too few for "
                 f"--way {cfg.way}; use --way {max(classes, 2)} or fewer{more}.")
    return sequence


def task_sequence(data: Dataset, cfg: Config, seed: int) -> tuple[list[Dataset], Dataset]:
    """Omniglot as tasks that arrive one by one, each a dataset of its own; and its unseen alphabets, to evaluate on.

    A class is named alphabet/character. Alphabets come in random order, each cut into tasks of cfg.way characters,
    none in two of them; evaluation takes the characters of a task from one alphabet too.
    DIFFERS: the last, incomplete task of an alphabet is left out, 24 of the paper's 254.
    """
    alphabets: dict[str, list[int]] = {}
    for c, name in enumerate(data.names):
        alphabets.setdefault(name.split("/")[0], []).append(c)
    val, test = (part.split() for part in ALPHABETS)
    if data.kind == "generated":
        val, test = list(alphabets)[4::5], list(alphabets)[3::5]
    rng, sequence, index = np.random.default_rng(seed), [], lambda c: torch.tensor(c).to(data.first)
    data = data._replace(setting=data.setting._replace(turns=1))
    for alphabet in rng.permutation([a for a in alphabets if a not in val + test]):
        letters = rng.permutation(alphabets[alphabet])
        for k in range(len(letters) // cfg.way):
            task = {"train": index(letters[k * cfg.way : (k + 1) * cfg.way])}
            sequence.append(data._replace(name=f"{alphabet} {k + 1}", splits=task))
    unseen = {s: index([c for a in part for c in alphabets[a] if len(alphabets[a]) >= cfg.way])
              for s, part in (("val", val), ("test", test))}
    need(sequence and len(unseen[cfg.split]), f"{data.name} has no alphabets of {cfg.way} characters; use a smaller --way.")
    alphabet = index([list(alphabets).index(name.split("/")[0]) for name in data.names])
    return sequence[: cfg.tasks], data._replace(name="unseen alphabets", splits=unseen, alphabet=alphabet)


def stream(device, *key) -> torch.Generator | None:
    """A generator seeded by what it is for, so that a resumed run draws exactly what the unbroken one did."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1
    return None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)


def sample_tasks(data: Dataset, split: str, tasks: int, cfg: Config, rng) -> Tensor:
    """Tasks as indices (T, N, K+Q) of images: a uniformly random ordered choice of classes, then of their images.

    The index i + n r stands for image i of n, turned r times by 90 degrees.
    """
    device, classes = data.images.device, data.splits[split]
    u = torch.rand(tasks, data.setting.turns * len(classes), generator=rng, device=device)
    if data.alphabet is not None:  # that of the class with the largest random number
        alphabet = data.alphabet[classes]
        u = u.masked_fill(alphabet != alphabet[u.argmax(1)][:, None], -1)
    chosen = u.topk(cfg.way).indices  # (T, N): the largest of random numbers are a random choice without repetition
    turn, c = chosen // len(classes), classes[chosen % len(classes)]
    u = torch.rand(tasks, cfg.way, data.most, generator=rng, device=device)
    u = u.masked_fill(torch.arange(data.most, device=device) >= data.count[c][..., None], -1)
    image = data.first[c][..., None] + u.topk(cfg.shot + cfg.query).indices
    return turn[..., None] * len(data.images) + image


def fetch(data: Dataset, index: Tensor, cfg: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices (T, N, K+Q) -> x_s (T, NK, C, 28, 28), y_s (T, NK), x_q (T, NQ, C, 28, 28), y_q (T, NQ)."""
    x = still = data.images[index % len(data.images)]
    for r in range(1, data.setting.turns):
        x = torch.where((index // len(data.images) == r)[..., None, None, None], still.rot90(r, (-2, -1)), x)
    low, high = x.amin((-3, -2, -1), keepdim=True), x.amax((-3, -2, -1), keepdim=True)
    x = (x - low) / (high - low).clamp(min=1).to(torch.get_default_dtype())  # each image to [0, 1]
    x = x.expand(*x.shape[:3], cfg.channels, 28, 28)
    y = torch.arange(cfg.way, device=x.device)[:, None].expand(index.shape)  # classes come in random order
    parts = [part for a, b in ((0, cfg.shot), (cfg.shot, None)) for part in (x[:, :, a:b], y[:, :, a:b])]
    return tuple(part.flatten(1, 2) for part in parts)


# ----------------------------------------------------------------------------------------------------- Network
# Parameters are a dictionary of tensors with a leading task axis T: every task owns a copy, and T networks run as one
# with grouped convolutions, whose channel groups are the tasks. Native batch norm then has per-task statistics.

Params = dict[str, Tensor]


def init_params(cfg: Config, rng, device="cpu") -> Params:
    """Weights uniform in +-1/sqrt(fan-in); no conv biases: batch norm's own mean would cancel them."""
    p, width = {}, cfg.channels
    for i in range(1, 5):
        p[f"conv{i}.weight"] = (torch.rand(cfg.filters, width, 3, 3, generator=rng) * 2 - 1) / math.sqrt(9 * width)
        p[f"norm{i}.weight"], p[f"norm{i}.bias"] = torch.ones(cfg.filters), torch.zeros(cfg.filters)
        width = cfg.filters
    p["linear.weight"] = (torch.rand(cfg.way, width, generator=rng) * 2 - 1) / math.sqrt(width)
    p["linear.bias"] = torch.zeros(cfg.way)
    return {n: v.to(device).requires_grad_() for n, v in p.items()}


def layer(p: Params, name: str, x: Tensor) -> Tensor:
    """One layer of T networks: conv or batch norm on x (B, T*C, H, W), or linear on x (T, B, D)."""
    w = p[f"{name}.weight"]
    if name.startswith("conv"):
        return F.conv2d(x, w.flatten(0, 1), padding=1, groups=len(w))
    if name.startswith("norm"):  # always the batch's own statistics, also in evaluation: transductive, as in MAML
        return F.batch_norm(x, None, None, w.flatten(), p[f"{name}.bias"].flatten(), training=True)
    return x @ w.mT + p[f"{name}.bias"][:, None]


def patches(x: Tensor, T: int) -> Tensor:
    """The 3x3 patches around every location, per task: (B, T*C, H, W) -> (T, 9C, B*H*W)."""
    return F.unfold(x, 3, padding=1).unflatten(1, (T, -1)).permute(1, 2, 0, 3).flatten(2)


def first_layer(p: Params, x: Tensor) -> Tensor:
    """conv1, norm1 and the pool, exactly: one matrix product with the patches, then the maximum, then the bias.

    Less their mean, the patches of a fixed input have a fixed covariance C: a filter w has the variance w'Cw on them.
    """
    w, T, (B, _, *size) = p["conv1.weight"].flatten(2), len(p["conv1.weight"]), x.shape  # w (T, O, 9C)
    u = patches(x, T)
    u -= u.mean(2, keepdim=True)
    covariance = u @ u.mT / u.shape[2]
    scale = p["norm1.weight"] * (((w @ covariance) * w).sum(2) + 1e-5).rsqrt()  # (T, O)
    h = (u.mT @ (w * scale[..., None]).mT).view(T * B, *size, -1).permute(0, 3, 1, 2)  # channels-last: pools fast
    h = F.max_pool2d(h, 2)
    if h.requires_grad:
        h.register_hook(lambda g: g.contiguous(memory_format=torch.channels_last))  # or the pool copies four times that
    h = h.unflatten(0, (T, B)) + p["norm1.bias"][:, None, :, None, None]
    return h.transpose(0, 1).flatten(1, 2)


def network(p: Params, x: Tensor, apply=None) -> Tensor:
    """Logits (T, B, N) of T networks for x (T, B, C, 28, 28); `apply` stands in for `layer`, to watch or to sample."""
    T, fast, apply = len(x), apply is None, apply or layer
    x = x.transpose(0, 1).flatten(1, 2)  # (B, T*C, 28, 28)
    once = p["conv1.weight"].is_leaf  # no second backward pass will follow: channels-last is then the faster layout
    x = x.contiguous(memory_format=torch.channels_last if once else torch.contiguous_format)
    for i in range(1, 5):
        if i == 1 and fast:
            x = first_layer(p, x)
        else:
            x = F.max_pool2d(apply(p, f"norm{i}", apply(p, f"conv{i}", x)), 2)
        x = F.relu(x)  # last: on a quarter of the values
    return apply(p, "linear", x.reshape(len(x), T, -1).transpose(0, 1))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over the images of each task: (T, B, N), (T, B) -> (T,)."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


# -------------------------------------------------------------------------------------------------- Adaptation


def adapt(p: Params, x, y, rate: float, steps: int, second_order=False, net=network) -> tuple[Params, Tensor]:
    """Eq. 1: `steps` steps of SGD on the support loss, all tasks at once. Also that loss (T,) before the first."""
    losses = []
    for _ in range(steps):
        losses.append(cross_entropy(net(p, x), y))
        grads = torch.autograd.grad(losses[-1].sum(), list(p.values()), create_graph=second_order)
        p = {n: v - rate * g for (n, v), g in zip(p.items(), grads)}
        p = p if second_order else leaves(p)
    return p, losses[0]


def leaves(p: Params, part=slice(None)) -> Params:
    """The same values as parameters of their own, from which gradients go no further back."""
    return {n: v[part].detach().requires_grad_() for n, v in p.items()}


def chunks(tasks: int, device) -> list[slice]:
    """How many tasks go through the query pass at once: on a CPU one, whose activations stay in cache; else all."""
    size = 1 if device.type == "cpu" else tasks
    return [slice(t, t + size) for t in range(0, tasks, size)]


def spread(theta: Params, tasks: int) -> Params:
    """Every task's own view of the shared parameters."""
    return {n: v.expand(tasks, *v.shape) for n, v in theta.items()}


def meta_gradient(theta: Params, batch, rate, steps, support_weight, net=network) -> tuple[Tensor, list[Tensor]]:
    """Sum over tasks of L(adapted, query) [Eq. 2] + support_weight L(theta, support) [Eq. 8], and its gradient.

    DIFFERS: the paper sums log-likelihoods over images; these are means, as in the authors' code, whose lambda it is.
    The true, second-order gradient, in two parts to save memory: dL/d(adapted) first, a few tasks at a time with
    nothing kept, then one backward pass through the adaptation of all tasks with it as the cotangent.
    """
    x_s, y_s, x_q, y_q = batch
    T = len(x_s)
    adapted, first = adapt(spread(theta, T), x_s, y_s, rate, steps, True, net)
    loss, cotangents = support_weight * first.detach().sum(), []
    for part in chunks(T, x_s.device):
        leaf = leaves(adapted, part)
        query_loss = cross_entropy(net(leaf, x_q[part]), y_q[part]).sum()
        cotangents.append(torch.autograd.grad(query_loss, list(leaf.values())))
        loss = loss + query_loss.detach()
    weights = [*(torch.cat(c) for c in zip(*cotangents)), torch.full_like(first, support_weight)]
    return loss, list(torch.autograd.grad([*adapted.values(), first], list(theta.values()), weights))


class Point:
    """No posterior: a point estimate, which is all that MAML and its kin carry forward."""

    support_weight = 0.0  # of the pre-adaptation support loss, f(2) in Eq. 8
    decays = True  # the outer rate follows the dataset's schedule
    carried: tuple[str, ...] = ()  # the attributes that a checkpoint holds

    def __init__(self, cfg: Config, theta: Params):
        self.cfg, self.extra = cfg, {}  # what is trained beside theta

    def gradient(self, theta: Params, batch, rate: float, steps: int, rngs) -> tuple[Tensor, list[Tensor]]:
        """The sum over tasks of the likelihood's part of the objective, and its gradient in theta and extra; `rngs` has
        a generator for each task."""
        return meta_gradient(theta, batch, rate, steps, self.support_weight)

    def penalty(self, theta: Params) -> tuple[Tensor | float, list[Tensor] | None]:
        """The prior's part of the objective, and its gradient in theta and extra."""
        return 0.0, None

    def absorb(self, theta: Params, data: Dataset, rng):
        """What the posterior takes from the dataset just learned."""

    def facts(self) -> dict:
        """What the record says of the posterior itself."""
        return {}

    def predict(self, p: Params, x: Tensor, rngs) -> dict[str, Tensor]:
        """Log-probabilities (T, B, N) under adapted parameters, by the prefix of their scores in the record."""
        return {"": network(p, x).log_softmax(-1)}


# The tasks of a meta-batch, of the curvature and of an evaluation are dealt out over the processes of torchrun.
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()
RANK, RANKS = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if TORCHRUN else (0, 1)


def mine(before: int = 0) -> slice:
    """Which of some tasks are this process's, after `before` others have been dealt out over the processes."""
    return slice((RANK - before) % RANKS, None, RANKS)


def wait():
    """Until all processes have come this far."""
    if RANKS > 1:
        torch.distributed.barrier()


def over_ranks(values: list[Tensor]) -> list[Tensor]:
    """The sum of each over all processes."""
    if RANKS == 1:
        return values
    flat = torch.cat([v.flatten() for v in values])
    torch.distributed.all_reduce(flat)
    return [part.view_as(v) for part, v in zip(flat.split([v.numel() for v in values]), values)]


# ----------------------------------------------------------------------------------------------------- Laplace
# BomLA. The posterior of theta is N(mean, precision^-1); the precision is block-diagonal over layers, each block a sum
# of Kronecker products that is never formed: (A(x)G) vec(D) = vec(G D A') (Eq. 24). A layer's parameters as a matrix D:
#   conv    (O, 9C), in the order of F.unfold: channel, row, column      A (9C, 9C)      G (O, O)
#   linear  (N, features + 1), the bias last                             A (D+1, D+1)    G (N, N)
#   norm    (C, 2): scale and shift                                      unit-wise blocks F (C, 2, 2) instead

Block = tuple[Tensor, ...]  # (A, G), with a leading axis of r pairs where they are summed; (F,) for batch norm


def to_matrix(p: Params, name: str) -> Tensor:
    if name.startswith("conv"):
        return p[f"{name}.weight"].flatten(1)
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"][:, None]
    return torch.cat([weight if weight.dim() == 2 else weight[:, None], bias], 1)


def to_params(matrix: Tensor, name: str, like: Params) -> Params:
    """The inverse of to_matrix."""
    if name.startswith("conv"):
        return {f"{name}.weight": matrix.view_as(like[f"{name}.weight"])}
    return {f"{name}.weight": matrix[:, :-1].reshape(like[f"{name}.weight"].shape), f"{name}.bias": matrix[:, -1]}


def layers_of(p: Params) -> list[str]:
    return [n.removesuffix(".weight") for n in p if n.endswith(".weight")]


def patch_gram(x: Tensor, T: int) -> Tensor:
    """patches(x) patches(x)', three times as fast where there are many: 25 autocorrelations in place of 81 products.

    Entry (c, i, j), (c', i', j') sums x[c, p] x[c', p + d] over the locations p that the patch's cell (i, j) visits, and
    depends on d = (i' - i, j' - j) alone if that were all of them. Cell 0 misses the last row, cell 2 the first (what it
    visits instead is padding), which matters only if the other factor is in the image too: i' = i. Columns likewise.
    """
    C, shift = x.shape[1] // T, torch.arange(3)[None] - torch.arange(3)[:, None] + 2  # (i, i') -> d + 2

    def correlation(x, height, width):  # (T, C, C', height, width): of x with itself, shifted
        pad = (height // 2, width // 2)
        return torch.nn.grad.conv2d_weight(x, (T * C, C, height, width), x, padding=pad, groups=T).unflatten(0, (T, C))

    A = correlation(x, 5, 5)[:, :, :, shift[:, None, :, None], shift[None, :, None, :]]  # (T, C, C', i, j, i', j')
    edges = ((0, slice(-1, None)), (2, slice(0, 1)))
    for i, row in edges:
        A[:, :, :, i, :, i, :] -= correlation(x[:, :, row], 1, 5)[:, :, :, 0, shift]
        A[:, :, :, :, i, :, i] -= correlation(x[..., row], 5, 1)[:, :, :, shift, 0]
        for j, column in edges:  # the corner was taken off twice
            A[:, :, :, i, j, i, j] += correlation(x[:, :, row, column], 1, 1)[:, :, :, 0, 0]
    return A.permute(0, 1, 3, 4, 2, 5, 6).reshape(T, 9 * C, 9 * C)


def input_factor(name: str, x: Tensor, T: int) -> Tensor:
    """A (T, P, P): mean over images of the sum over locations of the outer product of the layer's input with itself."""
    if name.startswith("conv"):
        if x[:, 0].numel() > 4 * 9 * x.shape[1] // T:  # many more patches than each is long
            return patch_gram(x, T) / len(x)
        u = patches(x, T)
        return u @ u.mT / len(x)
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1)  # (T, B, D+1)
    return x.mT @ x / x.shape[1]


def output_factor(name: str, x: Tensor, g: Tensor, T: int) -> Tensor:
    """G (T, O, O): mean over images and locations of g g', g being the gradient in the layer's output.

    Batch norm: the unit-wise block (T, C, 2, 2), the mean over images of the outer product of the gradient in (scale,
    shift), which sums over locations.
    """
    if name.startswith("conv"):
        g = g.unflatten(1, (T, -1)).permute(1, 2, 0, 3, 4).flatten(2)  # (T, O, B*H*W)
        return g @ g.mT / g.shape[2]
    if name.startswith("norm"):
        normal = F.batch_norm(x, None, None, training=True)
        g = torch.stack([(g * normal).sum((2, 3)), g.sum((2, 3))], -1).unflatten(1, (T, -1))  # (B, T, C, 2)
        return (g[..., None] * g[..., None, :]).mean(0)
    return g.mT @ g / g.shape[1]


def fisher_blocks(p: Params, x: Tensor, u: Tensor, exact: bool, net=network) -> dict[str, Block]:
    """K-FAC of T networks on their own inputs x (T, B, ...): of each layer A and G, one per task.

    The labels are the model's own, never the data's: one draw, by uniform numbers u (T, B); or `exact`, the expectation
    over them, for which the columns sqrt(p_c) (p - e_c) of a square root of diag(p) - p p' are N gradients in the
    logits. Batch norm lets an image's gradient reach the others; independent draws keep such terms at zero on average,
    and so do random signs, by u, of the images' columns.
    """
    seen = {}

    def watched(p, name, x):
        seen[name] = x.detach(), layer(p, name, x)
        return seen[name][1]

    logits = net(p, x, watched)  # (T, B, N)
    prob, eye = logits.detach().softmax(-1), torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    if exact:
        sign = torch.where(u < 0.5, -1.0, 1.0).to(prob)[..., None]
        signals = [sign * prob[..., c, None].sqrt() * (prob - eye[c]) for c in range(len(eye))]
    else:  # the first class whose cumulative probability exceeds u
        signals = [prob - eye[((prob @ torch.ones_like(eye).triu())[..., :-1] <= u[..., None]).sum(-1)]]
    outputs, G = [h for _, h in seen.values()], dict.fromkeys(seen, 0.0)
    for signal in signals:
        grads = torch.autograd.grad(logits, outputs, signal, retain_graph=True)
        for (name, (inputs, _)), g in zip(seen.items(), grads):
            G[name] = G[name] + output_factor(name, inputs, g, len(x))
    return {n: (G[n],) if n.startswith("norm") else (input_factor(n, h, len(x)), G[n]) for n, (h, _) in seen.items()}


def sandwich(support: Block, query: Block, a: float) -> Block:
    """(I - a A(x)G) (A_q(x)G_q) (I - a A(x)G)' = A_q(x)G_q - a AA_q(x)GG_q - a A_qA(x)G_qG + a^2 AA_qA(x)GG_qG."""
    if len(support) == 1:
        J = torch.eye(2, dtype=support[0].dtype, device=support[0].device) - a * support[0]
        return (J @ query[0] @ J.mT,)
    (A, G), (A_q, G_q) = support, query
    terms = lambda X_q, XX_q, X: torch.stack([X_q, XX_q, XX_q.mT, XX_q @ X], -3)  # (..., 4, P, P): X, X_q symmetric
    return terms(A_q, A @ A_q, A), terms(G_q, G @ G_q, G) * G.new_tensor([1, -a, -a, a * a])[:, None, None]


def adapted_curvature(theta: Params, batches, rate, steps, a: float, cfg: Config, net=network) -> dict[str, Block]:
    """Eqs. 25 to 28: the Fisher of the query sets at the adapted parameters as seen from theta (Eq. 11), per layer.

    The adaptation's Jacobian is I - a H, H being K-FAC's curvature of the support loss at theta.
    DIFFERS: the paper has a = 1 (Eq. 12); the derivative of one step of SGD has a = its rate.
    The mean over tasks is of each product of factors, as in the paper (`products`), or of each factor (`averages`).
    Each batch is x_s, y_s, x_q, y_q and uniform numbers, by which labels are drawn, for the support and query sets.
    """
    sums, tasks, products = {}, 0, cfg.averaging == "products"
    for x_s, y_s, x_q, _, u_s, u_q in batches:
        T = len(x_s)
        start = leaves(spread(theta, T))
        support = fisher_blocks(start, x_s, u_s, cfg.exact_labels, net)
        adapted, _ = adapt(start, x_s, y_s, rate, steps, net=net)
        parts = [fisher_blocks(leaves(adapted, part), x_q[part], u_q[part], cfg.exact_labels, net)
                 for part in chunks(T, x_s.device)]
        for name, s in support.items():
            q = tuple(torch.cat(f) for f in zip(*(part[name] for part in parts)))
            new = [f.sum(0) for f in (*(sandwich(s, q, a) if products else q), *s)]
            sums[name] = [x + y for x, y in zip(sums[name], new)] if name in sums else new
        tasks += T
    blocks, tasks = {}, over_ranks([x_s.new_tensor(tasks)])[0]
    for name, block in sums.items():
        mean = [f / tasks for f in over_ranks(block)]
        q, s = mean[: len(mean) // 2], mean[len(mean) // 2 :]
        blocks[name] = tuple(q) if products else sandwich(s, q, a)
        if cfg.support_hessian:
            blocks[name] = add_blocks(blocks[name], tuple(s) if len(s) == 1 else (s[0][None], s[1][None]))
    return blocks


def add_blocks(one: Block, other: Block) -> Block:
    """The sum: batch norm's adds up, Kronecker products are kept side by side."""
    return (one[0] + other[0],) if len(one) == 1 else tuple(torch.cat(pair) for pair in zip(one, other))


def merge(block: Block, rank: int) -> Block:
    """The nearest sum of `rank` Kronecker products in Frobenius norm (Van Loan and Pitsianis 1993).

    Rearranged, the sum of A_i(x)G_i is the matrix of vec(A_i) vec(G_i)', whose best approximation of a rank is its SVD;
    that needs no more than the r x r triangles of two QR decompositions. One pair of a positive semi-definite sum is
    positive semi-definite.
    """
    if len(block) == 1 or not rank or len(block[0]) <= rank:
        return block
    rank = min(rank, *(f[0].numel() for f in block))
    A, G = (f.flatten(1).T.double() for f in block)  # (P*P, r), (O*O, r)
    (Q_a, R_a), (Q_g, R_g) = torch.linalg.qr(A), torch.linalg.qr(G)
    U, S, V = torch.linalg.svd(R_a @ R_g.T)
    A, G = Q_a @ U[:, :rank], Q_g @ (V.T[:, :rank] * S[:rank])
    sign = A[:: block[0].shape[-1] + 1].sum(0).sign()  # of A's trace: both factors positive rather than both negative
    sign = torch.where(sign == 0, 1.0, sign)
    return tuple((f * sign).T.reshape(rank, *x.shape[1:]).to(x.dtype) for f, x in zip((A, G), block))


def times(block: Block, D: Tensor) -> Tensor:
    """The block's matrix times vec(D), as a matrix again: (A(x)G) vec(D) = vec(G D A'), summed over pairs."""
    if len(block) == 1:
        return (block[0] @ D[..., None])[..., 0]
    return (block[1] @ D @ block[0].mT).sum(0)


def extremes(block: Block, D: Tensor, steps: int = 100) -> tuple[float, float]:
    """The smallest and largest eigenvalue of a symmetric block B, by power iteration from D on it as an operator."""

    def power(operator) -> tuple[Tensor, Tensor]:
        E = D
        for _ in range(steps):
            v = E / E.norm().clamp(min=torch.finfo(E.dtype).tiny)
            E = operator(v)
        return (v * E).sum(), E.norm()

    size = power(lambda v: times(block, v))[1]  # of the largest in magnitude, of either sign
    low, high = (sign * power(lambda v: size * v + sign * times(block, v))[0] - sign * size for sign in (-1, 1))
    return low.item(), high.item()


class Laplace(Point):
    """BomLA, Algorithm 1: mean mu_t and precision Lambda_t = lambda H_t + Lambda_{t-1}."""

    support_weight, carried = 1.0, ("mean", "blocks")

    def __init__(self, cfg: Config, theta: Params):
        super().__init__(cfg, theta)
        self.mean, self.blocks = {n: torch.zeros_like(v) for n, v in theta.items()}, {}  # mu_0, and no curvature yet

    def penalty(self, theta):
        """1/2 (theta - mu)' Lambda (theta - mu) and Lambda (theta - mu)."""
        value, grads = 0.0, {}
        for name in layers_of(theta):
            D = to_matrix(theta, name).detach() - to_matrix(self.mean, name)
            # Lambda_0, the authors' values. DIFFERS: a multiple of the identity; their code has a matrix of ones.
            product = D * (1e-2 if name.startswith("linear") else 1e-4)
            if name in self.blocks:
                product = product + times(self.blocks[name], D)
            value = value + 0.5 * (D * product).sum()
            grads |= to_params(product, name, theta)
        return value, [grads[n] for n in theta]

    def absorb(self, theta, data, rng):
        cfg, setting = self.cfg, data.setting
        index = sample_tasks(data, "train", cfg.hessian_tasks, cfg, rng)
        u = [torch.rand(len(index), cfg.way * each, generator=rng, device=index.device) for each in (cfg.shot, cfg.query)]
        parts = [v[mine()].split(8) for v in (index, *u)]
        batches = ((*fetch(data, some, cfg), *draws) for some, *draws in zip(*parts))
        a = number("jacobian_rate", cfg.jacobian_rate or setting.inner_rate)
        new = adapted_curvature(theta, batches, setting.inner_rate, setting.inner_steps, a, cfg)
        self.mean = {n: v.detach().clone() for n, v in theta.items()}
        for name, block in new.items():
            need(all(f.isfinite().all() for f in block), f"the curvature of {data.name} is not finite in {name}; try a "
                 "smaller --jacobian-rate or --outer-rate.")
            block = (*block[:-1], block[-1] * cfg.past_weight)
            block = add_blocks(self.blocks[name], block) if name in self.blocks else block
            self.blocks[name] = self.definite(name, merge(block, cfg.merge_rank), to_matrix(theta, name).detach(), data)

    def definite(self, name: str, block: Block, D: Tensor, data: Dataset) -> Block:
        """The block if it is positive semi-definite, up to 1e-4 of its largest eigenvalue; of an indefinite one (`products`
        can give one) a sum with the multiple of the identity that makes it so: a penalty without a minimum runs away."""
        low, high = extremes(block, torch.ones_like(D) + D) if len(block) == 2 else (0.0, 0.0)
        if low >= -1e-4 * high:
            return block
        more = 1e-4 * high - low  # power iteration finds the smallest eigenvalue from above
        print(f"boml: the precision of {name} after {data.name} is not positive semi-definite (eigenvalues {low:.2g} to "
              f"{high:.2g}); {more:.2g} times the identity is added to it.", file=sys.stderr, flush=True)
        eye = [torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)[None] for f in block]
        return add_blocks(block, (eye[0], more * eye[1]))


# ------------------------------------------------------------------------------------------------- Variational
# BomVI. The posterior of theta is N(mean, diag(variance)), the mean being theta itself. Weights are not sampled: the
# pre-activations are, each by itself, from the normal distribution that random weights give it (local reparameterisation).

KL_WEIGHTS = {  # DIFFERS: fixed numbers, against the mean loss over query images plus that over support images
    "paper": 1 / 80,  # of the order of Eq. 14's, which sums over the 80 images of the paper's tasks
    "authors": 1 / (80 * 32 * 20),  # their code divides by images, tasks and samples of the paper's schedule
}


def noisy_layer(variance: Params, rngs: list):
    """A `layer` whose parameters are normal: p their mean, variance (T, ...) their variance; a generator per task."""

    def noise(h: Tensor) -> Tensor:  # drawn in the order of a channels-last tensor, which is five times as fast for one
        B, width = len(h), h.shape[1] // len(rngs)
        shape = (B, *h.shape[2:], width) if h.dim() == 4 else h.shape[1:]
        eps = [torch.randn(shape, generator=rng, dtype=h.dtype, device=h.device) for rng in rngs]
        return torch.cat(eps, -1).permute(0, 3, 1, 2) if h.dim() == 4 else torch.stack(eps)

    def noisy(p: Params, name: str, x: Tensor) -> Tensor:
        if name.startswith("norm"):  # scale and shift are drawn anew for each image
            x = F.batch_norm(x, None, None, training=True)
            scale, shift = (
                p[f"{name}.{n}"].flatten()[:, None, None] + variance[f"{name}.{n}"].flatten()[:, None, None].sqrt()
                * noise(x[..., :1, :1]) for n in ("weight", "bias"))
            return x * scale + shift
        # DIFFERS: mean from x, variance from x^2; the authors' conv takes both from x^2.
        mean, wide = layer(p, name, x), layer(variance, name, x * x)
        return mean + wide.clamp(min=torch.finfo(x.dtype).tiny).sqrt() * noise(mean)

    return noisy


def gaussian_kl(mean: Tensor, logvar: Tensor, prior_mean: Tensor, prior_logvar: Tensor) -> Tensor:
    """KL(N(mean, e^logvar) || N(prior_mean, e^prior_logvar)), summed over independent dimensions."""
    ratio = (logvar - prior_logvar).exp() + (mean - prior_mean) ** 2 / prior_logvar.exp()
    return 0.5 * (ratio - 1 - logvar + prior_logvar).sum()


class Variational(Point):
    """BomVI, Algorithm 2: mean (theta) and log-variance (extra) by Adam, both carried forward as the next prior."""

    decays, carried = False, ("extra", "prior", "history")  # Table 2 has no decay

    def __init__(self, cfg: Config, theta: Params):
        super().__init__(cfg, theta)
        self.extra = {n: torch.full_like(v, cfg.initial_logvar).requires_grad_() for n, v in theta.items()}
        first = math.log(cfg.first_variance)
        self.prior = {n: (torch.zeros_like(v), torch.full_like(v, first)) for n, v in theta.items()}
        self.kl_weight = number("kl_weight", KL_WEIGHTS.get(cfg.kl_weight, cfg.kl_weight))
        self.history: list[Params] = []  # the convs' variances after each dataset

    def expected_loss(self, mean: Params, x: Tensor, y: Tensor, rngs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """E_q of the cross-entropy, summed over the tasks of mean (T, ...), by S samples; gradients in mean and logvar.

        One sample after the other: batch norm then sees one sample's batch, and memory does not grow with S.
        """
        total, sums = 0.0, None
        mean, logvar = leaves(mean), leaves(self.extra)
        for _ in range(self.cfg.mc_samples):
            variance = spread({n: v.exp() for n, v in logvar.items()}, len(x))
            loss = cross_entropy(network(mean, x, noisy_layer(variance, rngs)), y).sum() / self.cfg.mc_samples
            grads = torch.autograd.grad(loss, [*mean.values(), *logvar.values()])
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
            total = total + loss.detach()
        return total, sums[: len(mean)], sums[len(mean) :]

    def gradient(self, theta, batch, rate, steps, rngs):
        """Eq. 14: adapt the mean by gradients at the mean (Eqs. 33, 34); then both likelihoods in expectation."""
        x_s, y_s, x_q, y_q = batch
        T, total, cotangents, logvar_grads = len(x_s), 0.0, [], []
        adapted, _ = adapt(spread(theta, T), x_s, y_s, rate, steps, second_order=True)
        for part in chunks(T, x_s.device):
            mean = {n: v[part] for n, v in adapted.items()}
            query, g, g_logvar = self.expected_loss(mean, x_q[part], y_q[part], rngs[part])
            total, cotangents, logvar_grads = total + query, cotangents + [g], logvar_grads + [g_logvar]
        support, g_s, g_logvar = self.expected_loss(spread(theta, T), x_s, y_s, rngs)
        g_q = [torch.cat(c) for c in zip(*cotangents)]
        grads = torch.autograd.grad(list(adapted.values()), list(theta.values()), g_q)
        grads = [a + b.sum(0) for a, b in zip(grads, g_s)]
        return total + support, grads + [sum(g) for g in zip(*logvar_grads, g_logvar)]

    def penalty(self, theta):
        kl = sum(gaussian_kl(theta[n], self.extra[n], *self.prior[n]) for n in theta) * self.kl_weight
        return kl.detach(), list(torch.autograd.grad(kl, [*theta.values(), *self.extra.values()]))

    def variances(self) -> Params:
        """Every conv layer's, mean over 3x3: (filters, inputs)."""
        return {n.removesuffix(".weight"): v.detach().exp().mean((2, 3)) for n, v in self.extra.items() if "conv" in n}

    def absorb(self, theta, data, rng):
        self.prior = {n: (theta[n].detach().clone(), self.extra[n].detach().clone()) for n in theta}
        self.history = (self.history + [self.variances()])[:10]  # enough for the figure

    def facts(self):
        return {"variance": {n: [v.mean().item(), v.std().item()] for n, v in self.variances().items()}}

    def predict(self, p, x, rngs):
        variance = spread({n: v.detach().exp() for n, v in self.extra.items()}, len(x))
        S = self.cfg.mc_samples
        samples = [network(p, x, noisy_layer(variance, rngs)).log_softmax(-1) for _ in range(S)]
        return super().predict(p, x, rngs) | {"sampled_": torch.stack(samples).logsumexp(0) - math.log(S)}


# -------------------------------------------------------------------------------------------------- Evaluation


def evaluate(theta: Params, posterior: Point, data: Dataset, cfg: Config, seed: int) -> dict[str, float]:
    """Scores on the query sets of unseen classes, the same tasks for every method; each posterior may predict in
    more ways than one."""
    device, tasks = data.images.device, torch.arange(cfg.eval_tasks)
    index = sample_tasks(data, cfg.split, cfg.eval_tasks, cfg, stream(device, seed, "evaluate", data.name))
    found: dict[str, list[Tensor]] = {}
    for some in tasks[mine()].split(4 if device.type == "cpu" else cfg.eval_tasks):
        x_s, y_s, x_q, y_q = fetch(data, index[some], cfg)
        rngs = [stream(device, seed, "evaluate", data.name, task) for task in some.tolist()]
        p, _ = adapt(leaves(spread(theta, len(some))), x_s, y_s, data.setting.inner_rate, data.setting.eval_steps)
        with torch.no_grad():
            for part in chunks(len(some), device):
                here = {n: v[part] for n, v in p.items()}
                for prefix, log in posterior.predict(here, x_q[part], rngs[part]).items():
                    sure, guess = log.max(-1)
                    true = log.gather(-1, y_q[part][..., None])[..., 0]
                    found.setdefault(prefix, []).append(torch.stack([(guess == y_q[part]).to(log), -true, sure.exp()]))
    for prefix, parts in found.items():
        values = torch.cat(parts, 1)
        found[prefix] = values.new_zeros(3, cfg.eval_tasks, values.shape[2])
        found[prefix][:, mine()] = values
        found[prefix] = over_ranks([found[prefix]])[0].double()
    for values in found.values():
        need(values.isfinite().all(), f"adapting to {data.name} gave values that are not finite; try a smaller "
             "--inner-rate for it.")
    return {prefix + k: v for prefix, values in found.items() for k, v in scores(values).items()}


def scores(found: Tensor, bins: int = 15) -> dict[str, float]:
    """From (right or wrong, negative log-likelihood, confidence) of every query (3, T, B)."""
    right, nll, sure = found
    accuracy = right.mean(1)
    ci95 = 1.96 * accuracy.std(correction=min(1, len(accuracy) - 1)) / math.sqrt(len(accuracy))
    # Expected calibration error: |accuracy - confidence| in bins of confidence, weighted by their share.
    bin_of = (sure.flatten() * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=sure.dtype, device=sure.device).index_add(0, bin_of, (right - sure).flatten())
    ece = gap.abs().sum() / right.numel()
    names = ("accuracy", "ci95", "nll", "ece")
    return dict(zip(names, (v.item() for v in (accuracy.mean(), ci95, nll.mean(), ece))), tasks=len(accuracy))


# --------------------------------------------------------------------------------------------------------- Run


class Method(NamedTuple):
    label: str
    data: str  # what it trains on: "current" dataset, "all" so far, or a "buffer" of past tasks
    start: str  # where each dataset's training starts: "previous" parameters, or "scratch"
    posterior: type[Point]  # what it carries forward beside them
    colour: str


METHODS = {  # in the order that shows the contrast early
    "maml": Method("Sequential MAML", "current", "previous", Point, "#d55e00"),
    "bomla": Method("BomLA", "current", "previous", Laplace, "#222222"),
    "bomvi": Method("BomVI", "current", "previous", Variational, "#cc79a7"),
    "toe": Method("Train-On-Everything", "all", "scratch", Point, "#0072b2"),
    "ftml": Method("Follow-The-Meta-Leader", "buffer", "previous", Point, "#009e73"),
}


def method_of(name: str) -> Method:
    """The row of "bomla", or of "bomla@1000": BomLA with a lambda of its own."""
    row, weight = METHODS[name.partition("@")[0]], name.partition("@")[2]
    return row._replace(label=f"{row.label}, lambda = {weight}") if weight else row


class Tasks:
    """The meta-batches of a method: lists of (dataset, indices of its tasks)."""

    def __init__(self, source: str, sequence: list[Dataset], cfg: Config, seed: int, buffer: list[Tensor]):
        self.source, self.sequence, self.cfg, self.seed = source, sequence, cfg, seed
        self.buffer = buffer  # of each dataset so far its tasks (J*M, N, K+Q), filled as they arrive

    def iterations(self, t: int) -> int:
        longer = self.source == "all" and self.cfg.toe_longer
        return sum(d.setting.iterations for d in self.sequence[0 if longer else t : t + 1])

    def plan(self, t: int, i: int) -> list[int]:
        """How many tasks of this meta-batch come from each of the datasets 0..t."""
        M = self.cfg.meta_batch
        if self.source == "current":
            return [0] * t + [M]
        if self.source == "all":  # evenly: dealt out in rounds, each in an order of its own
            order = lambda turn: torch.randperm(t + 1, generator=stream("cpu", self.seed, "plan", t, turn))
            owners = torch.stack([order(n // (t + 1))[n % (t + 1)] for n in range(i * M, (i + 1) * M)])
        else:  # uniformly over all tasks in the buffer; drawn on the host, which needs the counts
            sizes = torch.tensor([d.setting.iterations for d in self.sequence[:t]] + [i + 1], dtype=torch.double)
            owners = sizes.multinomial(M, replacement=True, generator=stream("cpu", self.seed, "plan", t, i))
        return torch.bincount(owners, minlength=t + 1).tolist()

    def batch(self, t: int, i: int) -> list[tuple[Dataset, Tensor]]:
        rng = stream(self.sequence[t].images.device, self.seed, "train", t, i)
        if self.source == "buffer":
            self.arrive(t, i, rng)
        batch = []
        for j, tasks in enumerate(self.plan(t, i)):
            if tasks and self.source == "buffer":
                size = self.cfg.meta_batch * (self.iterations(j) if j < t else i + 1)
                rows = torch.randint(size, (tasks,), generator=rng, device=self.buffer[j].device)
                batch.append((self.sequence[j], self.buffer[j][rows]))
            elif tasks:
                batch.append((self.sequence[j], sample_tasks(self.sequence[j], "train", tasks, self.cfg, rng)))
        return batch

    def arrive(self, t: int, i: int, rng):
        M = self.cfg.meta_batch
        new = sample_tasks(self.sequence[t], "train", M, self.cfg, rng)
        if len(self.buffer) == t:
            self.buffer.append(new.new_zeros(M * self.iterations(t), *new.shape[1:]))
        self.buffer[t][i * M : (i + 1) * M] = new


def meta_step(theta: Params, posterior: Point, optimiser, batch, cfg: Config, noise) -> Tensor:
    """One outer update on a meta-batch, each dataset in it with its own alpha and k; returns the objective.

    `noise(m)` is a generator for task m of the meta-batch.
    """
    params, before = [*theta.values(), *posterior.extra.values()], 0
    sums = [params[0].new_zeros(()), *map(torch.zeros_like, params)]  # of the loss and of its gradient
    for data, index in batch:
        own, rngs = index[mine(before)], [noise(before + m) for m in range(len(index))[mine(before)]]
        if rngs:
            setting, tasks = data.setting, fetch(data, own, cfg)
            loss, grads = posterior.gradient(theta, tasks, setting.inner_rate, setting.inner_steps, rngs)
            sums = [a + b for a, b in zip(sums, (loss, *grads))]
        before += len(index)
    loss, *grads = (v / cfg.meta_batch for v in over_ranks(sums))
    prior, prior_grads = posterior.penalty(theta)
    for p, g, h in zip(params, grads, prior_grads or [0.0] * len(params)):
        p.grad = g + h
    optimiser.step()
    return loss + prior


def new_optimiser(theta: Params, posterior: Point, cfg: Config) -> torch.optim.Adam:
    extra = [dict(params=list(posterior.extra.values()), lr=cfg.logvar_rate)] if posterior.extra else []
    return torch.optim.Adam([dict(params=list(theta.values())), *extra], lr=cfg.outer_rate)


def run(cfg: Config, facts: dict, sequence: list[Dataset], judges: list[Dataset], out: Path, tell, fresh=False):
    """Algorithm 1 for one method and one seed, evaluated on the judges; `tell(share done, text)` hears of the progress
    and answers whether to stop.

    Everything random is a function of the seed, the stage and the iteration, so a resumed run repeats an unbroken one.
    """
    row, seed, device = method_of(facts["method"]), facts["seed"], sequence[0].images.device
    facts = facts | dict(stages=len(sequence), judges=[d.name for d in judges], images=[len(d.images) for d in judges])
    held = None if RANK else lock(out)  # until this function returns
    for path in out.glob("checkpoint*") if fresh and not RANK else ():
        path.unlink()
    wait()  # for the first
    state = resume(out, facts | dict(sequence=[d.name for d in sequence]) | dataclasses.asdict(cfg), device)
    initial = lambda t: init_params(cfg, stream("cpu", seed, "init", t), device)
    theta = state["theta"] or initial(0)
    posterior = row.posterior(cfg, theta)
    vars(posterior).update(state["posterior"])
    tasks = Tasks(row.data, sequence, cfg, seed, state["buffer"])
    clock = time.time() - state["seconds"]
    cost = [tasks.iterations(t) * (1 + d.setting.inner_steps) for t, d in enumerate(sequence)]  # roughly
    for t in range(state["stage"], len(sequence)):  # line 3: a dataset arrives
        begin, state["iteration"], J = state["iteration"], 0, tasks.iterations(t)
        if row.start == "scratch" and t > 0 and begin == 0:
            theta = initial(t)
        optimiser = new_optimiser(theta, posterior, cfg)
        if begin:
            optimiser.load_state_dict(state["optimiser"])
            for moments in optimiser.state.values():
                moments["step"] = moments["step"].cpu()  # where Adam keeps it: on the device it would be waited for
        save = lambda stage, i: checkpoint(out, state["settings"], dict(
            stage=stage, iteration=i, seconds=time.time() - clock, theta=theta, buffer=tasks.buffer,
            posterior={n: getattr(posterior, n) for n in posterior.carried}, optimiser=optimiser.state_dict()))
        for i in range(begin, J):  # lines 4 to 11: meta-training on it
            falls = sum(i >= f * J for f in sequence[t].setting.decay) if cfg.decay and posterior.decays else 0
            optimiser.param_groups[0]["lr"] = cfg.outer_rate * 0.1**falls
            noise = lambda m: stream(device, seed, "noise", t, i, m)
            loss = meta_step(theta, posterior, optimiser, tasks.batch(t, i), cfg, noise)
            share = (sum(cost[:t]) + cost[t] * (i + 1) / J) / sum(cost)
            stop = tell(share, f"{facts['method']}-{seed} {sequence[t].name} {i + 1}/{J}")
            due = (i + 1) % cfg.eval_every == 0 or i + 1 in (sequence[t].setting.iterations, J)
            if due or stop or (i + 1) % CHECKPOINT_EVERY == 0:
                finite = all(p.isfinite().all() for p in (loss, *theta.values(), *posterior.extra.values()))
                need(finite, f"the loss of {facts['method']} became {loss.item()} on {sequence[t].name} by iteration "
                     f"{i + 1}; try a smaller --outer-rate or --inner-rate. {out}/checkpoint.pt, if there, is the last good state.")
                for data in judges if due else ():
                    found = evaluate(theta, posterior, data, cfg, seed)
                    where = dict(stage=t + 1, trained=sequence[t].name, iteration=i + 1, iterations=J)
                    where["evaluated"] = data.name
                    add_row(out, facts | where | found | posterior.facts() | dict(seconds=round(time.time() - clock, 1)))
                if i + 1 < J:
                    save(t, i + 1)
                    if stop:
                        return
        posterior.absorb(theta, sequence[t], stream(device, seed, "absorb", t))  # lines 12 to 16
        save(t + 1, 0)
        if t + 1 < len(sequence) and tell(share, ""):
            return


CHECKPOINT_EVERY = 100  # iterations


def kind_of(sequence: list[Dataset]) -> str:
    return " and ".join(sorted({d.kind for d in sequence}, reverse=True))


def digest(cfg: Config, sequence: list[Dataset]) -> str:
    """A short name for everything that the methods and seeds of one table must share."""
    return hashlib.md5(repr((cfg, [(d.name, d.mark) for d in sequence])).encode()).hexdigest()[:8]


def add_row(out: Path, row: dict):
    if RANK:
        return
    with open(out / "record.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def lock(out: Path):
    """The run's folder, for this process alone, for as long as the result is kept."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Problem(f"another process is at work in {out}; wait for it, or use another --out.")
    return file


def checkpoint(out: Path, settings: dict, state: dict):
    """Everything a resumed run needs; written beside the old ones, flushed, then put in place. The last two are kept."""
    if RANK:
        return
    last, before, new = out / "checkpoint.pt", out / "checkpoint.before.pt", out / "checkpoint.tmp"
    with open(new, "wb") as file:
        torch.save(state | dict(settings=settings, record=(out / "record.jsonl").stat().st_size), file)
        file.flush()
        os.fsync(file.fileno())
    if last.exists():
        os.replace(last, before)
    os.replace(new, last)


def resume(out: Path, settings: dict, device) -> dict:
    """The last checkpoint that can be read, with the record cut back to it; or a fresh start."""
    record, state = out / "record.jsonl", None
    for path in (out / "checkpoint.pt", out / "checkpoint.before.pt"):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums in the file
                need(not archive.testzip(), "a checksum in it is wrong")
            state = torch.load(path, weights_only=True, map_location=device)
            need(record.exists() and record.stat().st_size >= state["record"], f"{record} is shorter than it was.")
            break
        except FileNotFoundError:
            continue
        except Exception as error:  # whatever torch.load or a missing key may raise on bad bytes
            why = str(error).split("\n")[0][:80]
            print(f"boml: {path} is damaged ({why}); going back to what was before it.", file=sys.stderr, flush=True)
            state = None
    if state is None:
        if not RANK:
            record.write_text("")
        return dict(stage=0, iteration=0, seconds=0.0, settings=settings, theta=None, posterior={}, buffer=[])
    old = state["settings"]
    differ = [f"{k} was {old.get(k)!r}, now {settings[k]!r}" for k in settings if old.get(k) != settings[k]]
    differ = [d for d in differ if d.split()[0] not in ("settings", "judges", "images")] or ["other images"]  # these follow
    need(old == settings, f"{out} holds a run of other settings ({'; '.join(differ)}); use another --out, or --fresh to "
         "delete it and start over.")
    if not RANK:
        os.truncate(record, state["record"])
    return state


# ------------------------------------------------------------------------------------------------------ Report
# Tables and figures are made from the records on disk; the picture of BomVI's variances from its checkpoint.


def read_records(folder: Path, like: dict | None = None) -> dict[tuple[str, int], list[dict]]:
    """The rows of every <method>-<seed>/record.jsonl in the folder, methods in the table's order.

    Given `like`, some facts of a row, runs of other facts are left out, and named.
    """
    runs, order = {}, lambda m, s: (list(METHODS).index(m.split("@")[0]), float(m.partition("@")[2] or 0), s)
    for path in folder.glob("*/record.jsonl"):
        lines = path.read_text().split("\n")[:-1]  # a last line without its end is still being written
        try:
            rows = [json.loads(line) for line in lines]
        except ValueError:
            raise Problem(f"{path} is damaged; start that run over with --fresh.")
        if rows and like and any(rows[0].get(k) != v for k, v in like.items()):
            print(f"left out: {path.parent} is a run of other settings")
        elif rows:
            runs[rows[0]["method"], rows[0]["seed"]] = rows
    return dict(sorted(runs.items(), key=lambda item: order(*item[0])))


def student(n: int) -> float:
    """Half a 95 % interval of the mean of n values whose standard deviation is 1."""
    t = [math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]  # for more than 10 that of 10: too wide by 15 % at most
    return t[min(n - 1, 9)] / math.sqrt(n)


def interval(values: list[float], task_ci: list[float]) -> float:
    """Half a 95 % interval of the mean: Student's t over seeds, whose spread holds the tasks'; of one seed over tasks, and
    of two, which may agree by chance, no less than that."""
    n = len(values)
    over_seeds = student(n) * float(np.std(values, ddof=1)) if n > 1 else 0.0
    return over_seeds if n > 2 else max(over_seeds, float(np.linalg.norm(task_ci)) / n)


def finished(rows: list[dict]) -> dict[tuple[int, str], dict]:
    """(stage, dataset) -> the evaluation at the end of the stage, where all of them are there."""
    ends = {(r["stage"], r["evaluated"]): r for r in rows if r["iteration"] == r["iterations"]}
    return {(t, n): r for (t, n), r in ends.items() if all((t, other) in ends for other in r["judges"])}


def summarise(runs: dict) -> dict:
    """Per method: accuracy after each finished stage on each dataset, over seeds; forgetting and learning.

    Seeds that have not come as far as the others of their method do not count yet.
    """
    first = next(iter(runs.values()))[0]
    names, total = first["judges"], first["stages"]
    facts = ("experiment", "schedule", "data", "settings", "stages", "images")
    summary = {k: first.get(k) for k in facts} | dict(datasets=names, methods={})
    for method in dict.fromkeys(m for m, _ in runs):
        ends = {s: finished(rows) for (m, s), rows in runs.items() if m == method}
        stages = max(len(e) for e in ends.values()) // len(names)
        ends = {s: e for s, e in ends.items() if len(e) == stages * len(names)}
        grid = lambda of: [[of([e[t + 1, n] for e in ends.values()]) for n in names] for t in range(stages)]
        accuracy = grid(lambda rows: round(float(np.mean([r["accuracy"] for r in rows])), 4))
        ci95 = grid(lambda rows: round(interval([r["accuracy"] for r in rows], [r["ci95"] for r in rows]), 4))
        seconds = [[e[t + 1, names[0]]["seconds"] for t in range(stages)] for e in ends.values()]
        summary["methods"][method] = dict(
            seeds=sorted(ends), accuracy=accuracy, ci95=ci95,
            final_average=round(float(np.mean(accuracy[-1])), 4) if stages == total else None,
            seconds=[round(float(v), 1) for v in np.mean(seconds, 0)],  # from the start to the end of each stage
        )
        if total == len(names):  # a dataset for each stage
            after = {n: [row[j] for row in accuracy[j:]] for j, n in enumerate(names[:stages])}
            summary["methods"][method] |= dict(
                forgetting={n: round(max(v) - v[-1], 4) for n, v in after.items()},  # peak minus last
                learning={n: v[0] for n, v in after.items()})  # right after its own stage
        if method != "maml" and stages == total:
            apart = {n: effect(runs, [(1, method, total, n), (-1, "maml", total, n)]) for n in names}
            summary["methods"][method]["versus_maml"] = {
                n: [round(float(np.mean(v)), 4), round(interval(v, half), 4)] for n, (v, half) in apart.items() if v}
    return summary


def table(summary: dict) -> str:
    """Accuracy in per cent: right after each dataset's own stage -> after the last; or along a sequence of tasks."""
    names, total, methods = summary["datasets"], summary["stages"], summary["methods"]
    seeds = {s for m in methods.values() for s in m["seeds"]}
    percent = lambda v: f"{100 * v:.1f}"
    if total == len(names):
        what, heads, ends = "after its own stage -> after the last", names, ["average", "below peak"]
    else:
        quarters = sorted({max(1, total * q // 4) for q in (1, 2, 3, 4)})
        what, heads, ends = f"on {names[0]}", [f"after task {q}" for q in quarters], ["s/task", "later"]
    wide = max(20, *(len(n) + 2 for n in heads))
    lines = [f"{summary['experiment']}, {summary['data'].upper()} data, {summary['schedule']} schedule, "
             f"{len(seeds)} seed{'s' * (len(seeds) > 1)}: accuracy in % {what}",
             f"{'method':24}" + "".join(f"{n:>{wide}}" for n in heads) + "".join(f"{e:>11}" for e in ends)]
    for method, m in methods.items():
        cells, stages = [], len(m["accuracy"])
        show = lambda t, j: f"{percent(m['accuracy'][t][j])} ±{percent(m['ci95'][t][j])}"
        if total == len(names):
            for j, n in enumerate(names[:stages]):
                cells.append((f"{percent(m['learning'][n])} -> " if j < stages - 1 else "") + show(-1, j))
            past = [m["forgetting"][n] for n in names[: stages - 1]]
            ends = [m["final_average"], float(np.mean(past)) if past else None]
            ends = ["" if v is None else percent(v) for v in ends]
        else:  # and the time per task, over the first half and over the second
            cells, half = [show(q - 1, 0) for q in quarters if q <= stages], stages // 2
            time_of = lambda a, b: (m["seconds"][b - 1] - m["seconds"][a - 1]) / max(b - a, 1)
            ends = [f"{time_of(1, half):.1f}", f"{time_of(half, stages):.1f}"] if half > 1 else ["", ""]
        cells += [""] * (len(heads) - len(cells))
        lines.append(f"{method_of(method).label:24}" + "".join(f"{c:>{wide}}" for c in cells)
                     + "".join(f"{e:>11}" for e in ends))
    for method, m in methods.items():
        if m.get("versus_maml"):
            lines.append(f"  {method_of(method).label} minus sequential MAML, after the last: " + ", ".join(
                f"{n} {100 * d:+.1f} ±{100 * half:.1f}" for n, (d, half) in m["versus_maml"].items()))
    return "\n".join(lines)


def curve(runs: dict, method: str, evaluated: str) -> tuple[np.ndarray, np.ndarray]:
    """One line of the figure: times in stages (points,) and accuracies (seeds, points), as far as all its seeds have come."""
    series = [[(r["stage"] - 1 + r["iteration"] / r["iterations"], r["accuracy"]) for r in rows if r["evaluated"] == evaluated]
              for (m, _), rows in runs.items() if m == method]
    both = np.array([s[: min(map(len, series))] for s in series])  # (seeds, points, 2)
    return both[0, :, 0], both[:, :, 1]


SCALE = 3  # figures are drawn this many times as large, then reduced: smooth lines


def write(draw, x, y, words, size=11, anchor="mm"):
    draw.text((x * SCALE, y * SCALE), words, "#222222", ImageFont.load_default(size * SCALE), anchor)


def panel(draw, x0, y0, width, height, lines, begin, ticks, own):
    """One plot: lines of (colour, times, accuracies (seeds, points)), each a mean with a band of one standard deviation.

    Vertical lines at the ticks, which are ends of stages; the stage of the dataset's own training, which ends at `own`, grey.
    """
    values = np.concatenate([a.ravel() for _, _, a in lines])
    low, high = math.floor(values.min() * 10) / 10, math.ceil(values.max() * 10 - 1e-9) / 10
    high += 0.1 * (low == high)
    place = lambda t, a: ((x0 + width * (t - begin) / max(ticks[-1] - begin, 1e-9)) * SCALE,
                          (y0 + height * (high - a) / (high - low)) * SCALE)
    if own > begin:
        draw.rectangle([place(max(own - 1, begin), high), place(own, low)], "#00000010")
    draw.rectangle([x0 * SCALE, place(0, high)[1], (x0 + width) * SCALE, place(0, low)[1]], outline="#999999", width=SCALE)
    for tick in ticks:
        draw.line([place(tick, high), place(tick, low)], "#00000044", SCALE)
    for tick in np.arange(low, high + 0.001, 0.1 if high - low < 0.55 else 0.2):
        draw.line([x0 * SCALE, place(0, tick)[1], (x0 + width) * SCALE, place(0, tick)[1]], "#00000022", SCALE)
        write(draw, x0 - 6, place(0, tick)[1] / SCALE, f"{100 * tick:.0f}", anchor="rm")
    for colour, times, a in lines:
        points = [place(t, v) for t, v in zip(times, a.mean(0))]
        if len(a) > 1:
            top, bottom = ([place(t, v) for t, v in zip(times, a.mean(0) + s * a.std(0))] for s in (1, -1))
            draw.polygon(top + bottom[::-1], colour + "33", colour + "66")
        draw.line(points, colour, 2 * SCALE, joint="curve")
        for x, y in points if len(points) < 20 else ():
            draw.ellipse([x - 2 * SCALE, y - 2 * SCALE, x + 2 * SCALE, y + 2 * SCALE], colour)


def figure(runs: dict, summary: dict, path: Path):
    """The rows of the paper's grid: a plot for each dataset evaluated, along all of the training; a line per method, which
    starts anew at each stage if the method does."""
    names, methods, total = summary["datasets"], list(summary["methods"]), summary["stages"]
    grid, left, top, gap, width = total == len(names), 80, 76, 14, 700
    height = 140 if grid else 360
    runs = {(m, s): rows for (m, s), rows in runs.items() if s in summary["methods"][m]["seeds"]}  # as in the table
    spare = iter(("#e69f00", "#56b4e9", "#8c564b", "#7f7f7f") * 9)
    colour = {m: next(spare) if "@" in m else method_of(m).colour for m in methods}
    size = (left + width + 60, top + len(names) * (height + gap) + 24)
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), "white")
    draw = ImageDraw.Draw(image, "RGBA")
    facts = f"({summary['data']} data, {summary['schedule']} schedule)"
    write(draw, left, 18, f"{summary['experiment']}: accuracy on unseen classes, %   {facts}", 16, "lm")
    x, y = left, 42
    for method, label in ((m, method_of(m).label) for m in methods):
        wide = 46 + ImageFont.load_default(13).getlength(label)
        x, y = (x, y) if x + wide < size[0] else (left, y + 17)
        draw.line([x * SCALE, y * SCALE, (x + 22) * SCALE, y * SCALE], colour[method], 3 * SCALE)
        write(draw, x + 28, y, label, 13, "lm")
        x += wide
    ticks = {t: f"after {n}" for t, n in enumerate(names, 1)} if grid else {
        max(1, total * q // 4): f"after task {max(1, total * q // 4)}" for q in (1, 2, 3, 4)}
    begin = min(r["stage"] - 1 + r["iteration"] / r["iterations"] for rows in runs.values() for r in rows)
    for j, name in enumerate(names):
        lines, y = [], top + j * (height + gap)
        for method in methods:
            times, a = curve(runs, method, name)
            apart = np.ceil(times) if method_of(method).start == "scratch" and grid else np.zeros(len(times))
            lines += [(colour[method], times[apart == stage], a[:, apart == stage]) for stage in sorted(set(apart))]
        panel(draw, left, y, width, height, lines, begin, list(ticks), j + 1 if grid else 0)
        label = Image.new("L", (height * SCALE, 20 * SCALE))
        ImageDraw.Draw(label).text((height * SCALE / 2, 10 * SCALE), name, 255, ImageFont.load_default(13 * SCALE), "mm")
        image.paste("#222222", (18 * SCALE, y * SCALE), label.rotate(90, expand=True))
    for t, label in ticks.items():
        write(draw, left + width * (t - begin) / max(total - begin, 1e-9), size[1] - 20, label, anchor="rm" if t == total else "mm")
    image.resize(size, Image.Resampling.LANCZOS).save(path, optimize=True)


def covariance(folder: Path, runs: dict, summary: dict) -> str:
    """BomVI's variances after each dataset: numbers over seeds into the summary, the first seed's as a picture."""
    names = summary["datasets"] if summary["stages"] == len(summary["datasets"]) else []
    ends = {seed: finished(rows) for (method, seed), rows in runs.items() if method == "bomvi"}
    found = {seed: [e[t, n]["variance"] for t, n in enumerate(names, 1) if "variance" in e.get((t, n), ())]
             for seed, e in ends.items()}
    done = min(map(len, found.values()), default=0)
    if not done:
        return ""
    names, layers = names[:done], list(next(iter(found.values()))[0])
    over_seeds = lambda t, layer: np.mean([h[t][layer] for h in found.values()], 0).tolist()
    numbers = {layer: {name: over_seeds(t, layer) for t, name in enumerate(names)} for layer in layers}
    by_seed = {layer: [[v[layer][0] for v in h] for h in found.values()] for layer in layers}
    summary["methods"]["bomvi"] |= dict(variance=numbers, variance_by_seed=by_seed)
    checkpoint = folder / f"bomvi-{min(found)}" / "checkpoint.pt"
    if checkpoint.exists():
        heat_maps(checkpoint, folder / "covariance.png", layers, names, summary["data"])
    lines = ["BomVI's variances, mean (spread) per layer" + "".join(f"{'after ' + n:>28}" for n in names)]
    for name, by_dataset in numbers.items():
        lines.append(f"{name:42}" + "".join(f"{f'{m:.3g} ({s:.2g})':>28}" for m, s in by_dataset.values()))
    return "\n" + "\n".join(lines)


def heat_maps(checkpoint: Path, path: Path, layers: list[str], names: list[str], data: str):
    """The variances of each conv layer, filters x inputs, after each dataset."""
    try:
        history = torch.load(checkpoint, weights_only=True, map_location="cpu")["posterior"]["history"][: len(names)]
    except Exception:  # damaged, which is the run's business
        history = []
    if not history:  # the record is written before the checkpoint
        return
    logs = [[h[layer].log10().numpy() for h in history] for layer in layers]
    side, left, top, gap = 128, 70, 70, 24
    size = (left + len(names) * (side + gap) + 70, top + len(layers) * (side + gap))
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), "white")
    draw = ImageDraw.Draw(image)
    write(draw, 12, 18, f"BomVI: log10 of the variance, filters x inputs   ({data} data)", 13, "lm")
    low, high = min(m.min() for row in logs for m in row), max(m.max() for row in logs for m in row)

    def colour(values):  # dark blue to green to yellow
        v = (values - low) / max(high - low, 1e-9)
        stops = ((40, 30, 250), (10, 140, 230), (90, 140, 40))
        return Image.fromarray(np.stack([np.interp(v, (0, 0.5, 1), s) for s in stops], -1).astype(np.uint8))

    for l, row in enumerate(logs):
        y = top + l * (side + gap)
        write(draw, left / 2, y + side / 2, layers[l], 13)
        for t, values in enumerate(row):
            x = left + t * (side + gap)
            box = Image.Resampling.NEAREST
            image.paste(colour(values).resize((side * SCALE, side * SCALE), box), (x * SCALE, y * SCALE))
            if l == 0:
                write(draw, x + side / 2, top - 14, f"after {names[t]}")
    bar = colour(np.linspace(high, low, 64)[:, None]).resize((14 * SCALE, 2 * side * SCALE))
    image.paste(bar, ((size[0] - 60) * SCALE, top * SCALE))
    for value, y in ((high, top + 6), ((low + high) / 2, top + side), (low, top + 2 * side - 6)):
        write(draw, size[0] - 40, y, f"{value:.2f}", anchor="lm")
    image.resize(size, Image.Resampling.LANCZOS).save(path, optimize=True)


def revision() -> str:
    """Of this program, where it is a git checkout."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git
        return "unknown"


def report(folder: Path, like: dict | None = None, environment: dict | None = None) -> str:
    """Write summary.json and the figures from the records in the folder; returns the table."""
    runs = {key: rows for key, rows in read_records(folder, like).items() if finished(rows)}
    if not runs:
        return "no stage is finished yet"
    summary = summarise(runs)
    summary["environment"] = environment or dict(
        python=sys.version.split()[0], torch=torch.__version__, numpy=np.__version__, revision=revision(),
        command=" ".join(sys.argv[1:]))
    variances = covariance(folder, runs, summary)
    summary["claims"] = claims(summary, runs)
    new = folder / f"summary.{os.getpid()}.tmp"
    new.write_text(json.dumps(summary, indent=1))
    os.replace(new, folder / "summary.json")
    figure(runs, summary, folder / "accuracy.png")
    return table(summary) + variances


# ------------------------------------------------------------------------------------------------------ Claims
# What the paper says of its experiments, each as an effect that the records can speak to. An effect is a weighted sum of
# accuracies, taken seed by seed; a claim holds if the effect's 95 % interval lies in the range that counts for it.

Term = tuple[float, str, int, str]  # weight, method, stage, dataset


class Claim(NamedTuple):
    section: str  # of the paper
    text: str
    terms: list[Term]
    low: float = 0.0  # the effect counts for the claim if it is above this
    high: float = math.inf  # and below that


LITTLE = 0.03  # "almost no forgetting" and the like: this much accuracy
SMALL = 0.10  # "a small trade-off"


def claims_of(experiment: str, names: list[str], T: int) -> list[Claim]:
    """The claims about an experiment of T stages, evaluated on these datasets."""
    mean = lambda m, stages, over, sign=1: [(sign / len(stages) / len(over), m, t, n) for t in stages for n in over]
    label = lambda m: method_of(m).label
    if experiment == "run" or T < 2:
        return []
    if T != len(names):  # a sequence of tasks
        q = max(1, T // 4)
        gain = lambda m: mean(m, range(T - q + 1, T + 1), names) + mean(m, range(1, q + 1), names, -1)
        late = lambda m, sign=1: mean(m, range(T - q + 1, T + 1), names, sign)
        return [
            *(Claim(section, f"{label(m)} gathers few-shot ability along the sequence", gain(m))
              for section, m in (("6.2", "bomla"), ("6.2", "bomvi"), ("6.3", "maml"))),
            Claim("6.2", "Train-On-Everything gains nothing from task to task", gain("toe"), -math.inf, LITTLE),
            *(Claim("6.2", f"{label(b)} stays below {label(m)}", late(m) + late(b, -1))
              for m in ("bomla", "bomvi") for b in ("maml", "ftml")),
            *(Claim("6.2", f"BomLA with lambda = 0.01 is better than {label(m)}", late("bomla") + late(m, -1))
              for m in ("bomvi", "bomla@1", "bomla@100")),
        ]
    past, last = names[:-1], names[-1:]
    end = lambda m, over, sign=1: mean(m, [T], over, sign)
    loss = lambda m, n: [(1, m, names.index(n) + 1, n), (-1, m, T, n)]
    new = lambda m, sign=1: [(sign / (T - 1), m, t, n) for t, n in enumerate(names[1:], 2)]  # right after the own stage
    of = lambda weight: "bomla" if weight == 100 else f"bomla@{weight}"
    return [
        *(Claim("6.1", f"Sequential MAML forgets {n} by the end", loss("maml", n)) for n in past),
        *[Claim("6.1", f"BomLA loses almost nothing of {names[0]} while it learns {names[1]}",
                [(1, "bomla", 1, names[0]), (-1, "bomla", 2, names[0])], -math.inf, LITTLE)] * (experiment == "triathlon"),
        *(Claim("6.1", f"{label(m)} loses almost nothing of the past by the end (on average)",
                [(w / len(past), *term) for n in past for w, *term in loss(m, n)], -math.inf, LITTLE) for m in ("bomla", "bomvi")),
        *(Claim("6.1", f"{label(m)} keeps more of {n} than sequential MAML", end(m, [n]) + end("maml", [n], -1))
          for m in ("bomla", "bomvi") for n in past),
        *(Claim("6.1", f"{label(m)} pays a little on the newest, {last[0]}", end("maml", last) + end(m, last, -1), 0, SMALL)
          for m in ("bomla", "bomvi")),
        *(Claim("6.1", f"Sequential MAML learns new datasets better than {label(m)}", new("maml") + new(m, -1))
          for m in ("bomla", "bomvi", "ftml")),
        *(Claim("6.1", f"Train-On-Everything keeps {n}", loss("toe", n), -math.inf, LITTLE) for n in past),
        Claim("6.1", f"Train-On-Everything is behind on {last[0]} after as many iterations as sequential MAML",
              end("maml", last) + [(-1, "toe like maml", T, last[0])]),
        Claim("6.1", "BomLA is ahead of BomVI on average", end("bomla", names) + end("bomvi", names, -1)),
        *(Claim("C.3", f"lambda = 100 gives a better balance (on average) than {w}",
                end("bomla", names) + end(of(w), names, -1)) for w in (1, 1000)),
        *(Claim("C.3", f"Raising lambda from {a} to {b} keeps more of the past", end(of(b), past) + end(of(a), past, -1))
          for a, b in ((1, 100), (100, 1000))),
        *(Claim("C.3", f"Raising lambda from {a} to {b} learns less of {last[0]}", end(of(a), last) + end(of(b), last, -1))
          for a, b in ((1, 100), (100, 1000))),
    ]


def accuracy_of(runs: dict, method: str, seed: int, stage: int, name: str) -> dict | None:
    """The evaluation at the end of a stage; of "toe like maml" the one after as many iterations as MAML's stage had."""
    if method == "toe like maml":
        row = accuracy_of(runs, "maml", seed, stage, name)
        same = lambda r: row and (r["stage"], r["iteration"], r["evaluated"]) == (stage, row["iterations"], name)
        return next((r for r in runs.get(("toe", seed), ()) if same(r)), None)
    return finished(runs.get((method, seed), [])).get((stage, name))


def effect(runs: dict, terms: list[Term]) -> tuple[list[float], list[float]]:
    """A weighted sum of accuracies, seed by seed (same start, same tasks), with half its 95 % interval over tasks."""
    values, half = [], []
    for seed in sorted({s for _, s in runs}):
        rows = [(w, accuracy_of(runs, m, seed, t, n)) for w, m, t, n in terms]
        if all(r for _, r in rows):
            values.append(sum(w * r["accuracy"] for w, r in rows))
            same = {}  # a method's accuracies on one dataset come from the same tasks: their errors add up
            for (w, m, _, n), (_, r) in zip(terms, rows):
                same[m, n, w > 0] = same.get((m, n, w > 0), 0) + abs(w) * r["ci95"]
            half.append(math.hypot(*same.values()))
    return values, half


def judge(values: list[float], half: list[float], low: float, high: float) -> dict:
    """An effect, seed by seed, with half its interval over tasks, against the range that counts for the claim.

    Where that cannot tell: which way it leans, and the least number of seeds that would tell at the same mean and spread.
    """
    effect, ci95 = float(np.mean(values)), interval(values, half)
    holds, fails = low < effect - ci95 and effect + ci95 < high, effect + ci95 <= low or effect - ci95 >= high
    verdict = "holds" if holds else "does not hold" if fails else "cannot tell yet"
    found = dict(effect=round(effect, 4), ci95=round(ci95, 4), seeds=len(values), verdict=verdict)
    if verdict == "cannot tell yet":
        near, lean = min(abs(effect - low), abs(effect - high)), "hold" if low < effect < high else "fail"
        enough = (n for n in range(len(values) + 1, 31) if student(n) * np.std(values, ddof=1) < near)
        more = f"{next(enough, 31)} seeds or more" if len(values) > 2 else "more seeds"
        found["missing"] = f"leans to {lean}: {more}"
    return found


def claims(summary: dict, runs: dict) -> list[dict]:
    """Every claim with what counts for it, its effect, 95 % interval and verdict; or the run that is missing."""
    found, names = [], summary["datasets"]
    for claim in claims_of(summary["experiment"], names, summary["stages"]):
        count = "above" if claim.high == math.inf else "below" if claim.low == -math.inf else "between"
        bounds = " and ".join(f"{100 * b:g}" for b in (claim.low, claim.high) if abs(b) < math.inf)
        row = dict(section=claim.section, claim=claim.text, counts=f"{count} {bounds} points")
        values, half = effect(runs, claim.terms)
        missing = sorted({m.split()[0] for _, m, _, _ in claim.terms} - {m for m, _ in runs})
        row |= judge(values, half, claim.low, claim.high) if values else dict(
            verdict="cannot tell yet", missing="needs " + (" and ".join(missing) or "all of its methods, finished, with one seed"))
        found.append(row)
    layers = summary["methods"].get("bomvi", {}).get("variance_by_seed", {})
    layers = {layer: [v for v in seeds if len(v) == len(names)] for layer, seeds in layers.items()}
    if found and layers.get("conv1"):
        log = {layer: np.array([math.log(v[-1] / v[0]) for v in seeds]) for layer, seeds in layers.items()}
        shrink = {"BomVI's variances shrink from the first dataset to the last (log ratio)": np.mean(list(log.values()), 0)}
        shrink |= {f"more in {layer} than in conv4 (difference of log ratios)": log[layer] - log["conv4"]
                   for layer in ("conv1", "conv2")}
        for text, values in shrink.items():
            verdict = judge(list(values), [0.0], -math.inf, 0.0)
            if len(values) == 1:  # without a second seed no interval
                verdict |= dict(verdict="cannot tell yet", missing="needs more seeds")
            found.append(dict(section="C.2", claim=text, counts="below 0") | verdict)
    return found


def claim_cells(r: dict) -> tuple[str, str, str]:
    """A claim's effect, number of seeds and verdict, in words."""
    scale, digits = (1, 2) if "log ratio" in r["claim"] else (100, 1)
    effect = f"{scale * r['effect']:+.{digits}f} ± {scale * r['ci95']:.{digits}f}" if "effect" in r else "not run"
    return effect, str(r.get("seeds", "")), r["verdict"] + (f" ({r['missing']})" if "missing" in r else "")


def claims_table(rows: list[dict]) -> str:
    wide, lines = max(len(r["claim"]) for r in rows) if rows else 0, []
    for r in rows:
        effect, seeds, verdict = claim_cells(r)
        count = f"{seeds} seed{'s' * (seeds != '1')}" if seeds else ""
        lines.append(f"{r['section']:5}{r['claim']:{wide}}{effect:>14}{count:>9}  ({r['counts']}): {verdict}")
    return "\n".join(lines)


def show_claims(out: Path):
    """The claims of every experiment whose records are in the folder, on the screen and in claims.json."""
    every = {}
    for path in (out / e / "summary.json" for e in EXPERIMENTS):
        try:
            old = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            raise Problem(f"{path} is damaged; delete it: it is made again from the records.")
        report(path.parent, dict(settings=old["settings"]) if old.get("settings") else None, old.get("environment"))
        if path.exists():
            summary = json.loads(path.read_text())
            every[summary["experiment"]] = summary["claims"]
            print(f"{summary['experiment']}, {summary['data'].upper()} data, {summary['schedule']} schedule: effects in points "
                  f"of accuracy, 95 % intervals\n{claims_table(summary['claims']) or 'the paper says nothing of it'}\n")
    need(every, f"{out} holds no finished experiment; run one first, or name the --out of one.")
    (out / "claims.json").write_text(json.dumps(every, indent=1))


# ----------------------------------------------------------------------------------------------- Approximation
# How near is the curvature that BomLA carries to the exact adapted Fisher of Eq. 11? On networks small enough to know.

FORMS = {  # name: averaging, jacobian rate (None: alpha)
    "no Jacobian": ("averages", 0.0),
    "averages, rate alpha": ("averages", None),
    "averages, rate 1": ("averages", 1.0),
    "products, rate alpha": ("products", None),
    "products, rate 1": ("products", 1.0),
}


def tanh_network(p: Params, x: Tensor, layer=layer) -> Tensor:
    *hidden, last = layers_of(p)
    for name in hidden:
        x = torch.tanh(layer(p, name, x))
    return layer(p, last, x)


def tiny_problem(seed: int, iterations: int, alpha: float, sizes=(4, 5, 5, 3), tasks=8) -> tuple[Params, tuple]:
    """A tanh network, meta-trained for some iterations on random 3-way tasks, and a batch of tasks; float64."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.double)

    def batch(way=sizes[-1], query=5):  # each class a point and noise around it
        x = normal(tasks, way, 1, sizes[0]) + 0.5 * normal(tasks, way, 1 + query, sizes[0])
        y = torch.arange(way)[:, None].expand(tasks, way, 1 + query)
        return tuple(part.flatten(1, 2) for s in (slice(0, 1), slice(1, None)) for part in (x[:, :, s], y[:, :, s]))

    theta = {}
    for l, (i, o) in enumerate(zip(sizes, sizes[1:])):
        theta |= {f"linear{l}.weight": normal(o, i) / math.sqrt(i), f"linear{l}.bias": 0.1 * normal(o)}
    theta = {n: v.requires_grad_() for n, v in theta.items()}
    optimiser = torch.optim.Adam(theta.values(), 0.01)
    for _ in range(iterations):
        for p, g in zip(theta.values(), meta_gradient(theta, batch(), alpha, 1, 1.0, tanh_network)[1]):
            p.grad = g / tasks
        optimiser.step()
    return theta, batch()


def dense(block: Block) -> np.ndarray:
    return sum(np.kron(A, G) for A, G in zip(*(f.detach().numpy() for f in block)))


def approximation(folder: Path, nets: int = 10, alpha: float = 0.4) -> str:
    """Table of relative Frobenius error and angle to the exact block, median over networks; also as a file."""
    import reference_numpy as reference

    found: dict[str, list] = {}
    for trained, steps, seed in itertools.product((0, 300), (1, 3), range(nets)):
        theta, batch = tiny_problem(seed, trained, alpha)
        net = [to_matrix(theta, n).detach().numpy() for n in layers_of(theta)]
        signs = [torch.zeros(y.shape) for y in batch[1::2]]  # of no matter: no batch norm here
        exact = reference.adapted_fisher(net, list(zip(*(b.numpy() for b in batch))), alpha, steps)
        for form, (averaging, rate) in FORMS.items():
            cfg = Config(averaging=averaging, exact_labels=True)
            a = alpha if rate is None else rate
            blocks = adapted_curvature(theta, [(*batch, *signs)], alpha, steps, a, cfg, tanh_network)
            for pairs, rank in (("all pairs", 0), ("one pair", 1)):
                for l, (where, block) in enumerate(zip(reference.blocks(net), blocks.values())):
                    X, Y = dense(merge(block, rank)), exact[where, where]
                    cosine = (X * Y).sum() / np.linalg.norm(X) / np.linalg.norm(Y)
                    key = f"{'trained' if trained else 'untrained'}, k={steps}|{form}|{pairs}|layer {l + 1}"
                    error = np.linalg.norm(X - Y) / np.linalg.norm(Y)
                    found.setdefault(key, []).append((error, np.degrees(np.arccos(min(cosine, 1.0)))))
    medians = {key: [round(float(m), 3) for m in np.median(values, 0)] for key, values in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(nets=nets, alpha=alpha, measured="relative Frobenius error, angle in degrees: median over networks")
    (folder / "approximation.json").write_text(json.dumps(facts | dict(medians=medians), indent=1))
    lines = [f"Relative Frobenius error / angle in degrees to the exact adapted Fisher; median of {nets} networks"]
    for state in dict.fromkeys(key.split("|")[0] for key in medians):
        lines.append(f"{state:32}" + "".join(f"{f'layer {l}':>14}" for l in (1, 2, 3)))
        for form in FORMS:
            for pairs in ("all pairs", "one pair"):
                cells = [medians[f"{state}|{form}|{pairs}|layer {l}"] for l in (1, 2, 3)]
                lines.append(f"  {form:20}  {pairs:8}" + "".join(f"{e:9.2f} /{d:3.0f}" for e, d in cells))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ Command line


COMMANDS = [*EXPERIMENTS, "approximation", "claims"]


def options() -> argparse.ArgumentParser:
    """Those of a run, and every field of Config."""
    parser = data_prep.Parser(prog="boml.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help=f"one of {', '.join(COMMANDS)}; run.sh also has test, bench and data")
    parser.add_argument("--sequence", help=f"datasets in order, comma-separated, of {', '.join(DATASETS)}, or a folder "
                        "that holds a folder of images for each class (default: the experiment's)")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated, of %(default)s (default: all)")
    parser.add_argument("--seeds", default="0", help="comma-separated whole numbers (default: %(default)s)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: paper with CUDA, else cpu")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of <name>.npz (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for records (default: %(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="as torch names it (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=0, help="runs side by side (default: one per core, or 1 with CUDA)")
    parser.add_argument("--prepare", action="store_true", help="first download the datasets that the folder lacks")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time on CUDA too, more slowly")
    parser.add_argument("--fresh", action="store_true", help="start these runs over instead of resuming them")
    help_of = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(Config), re.M))
    for field in dataclasses.fields(Config):
        cpu = SCHEDULES["cpu"].get(field.name)
        default = f"; on the cpu schedule {cpu}, or the experiment's own" if cpu else ""
        default = f" (default: {field.default}{default})"
        kind = {"int": int, "float": float, "str": str, "bool": None}[field.type]
        kind = str if field.name == "past_weight" else kind  # several may be given
        how = dict(type=kind) if kind else dict(action=argparse.BooleanOptionalAction)
        parser.add_argument(option(field.name), help=help_of[field.name] + default * (field.default != ""), **how)
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The command line, checked: what to run, and its configuration."""
    args = options().parse_args(argv)
    need(args.experiment in COMMANDS, f"{args.experiment!r} is not an experiment; choose from {', '.join(COMMANDS)}.")
    experiment = EXPERIMENTS.get(args.experiment, Experiment("omniglot"))
    args.sequence = args.sequence or experiment.sequence
    need(args.sequence, "run needs --sequence: datasets in order, comma-separated.")
    args.sequence, args.methods, args.seeds = (t.split(",") for t in (args.sequence, args.methods, args.seeds))
    for name in args.sequence:
        need(name in DATASETS or name and Path(name).is_dir(), f"--sequence: {name!r} is neither a folder nor a dataset; "
             f"choose from {', '.join(DATASETS)}.")
    one = args.sequence[0] in ("omniglot", "generated_characters") and len(args.sequence) == 1
    need(args.experiment != "omniglot" or one, "omniglot takes --sequence omniglot or generated_characters, no other.")
    for field in ("sequence", "methods", "seeds"):
        values = getattr(args, field)
        need(len(set(values)) == len(values), f"--{field} {','.join(values)} names something twice.")
    for method in args.methods:
        need(method in METHODS, f"--methods: {method!r} is not a method; choose from {', '.join(METHODS)}.")
    for seed in args.seeds:
        need(seed == "0" or seed.isdecimal() and seed[0] != "0", f"--seeds: {seed!r} is not a whole number.")
    need(args.jobs >= 0, f"--jobs is {args.jobs}; it must be 1 or more.")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):
        raise Problem(f"--device {args.device} is not to be had here; use cpu.")
    need(torch.device(args.device).type != "meta", "--device meta computes nothing; use cpu.")
    args.schedule = args.schedule or ("paper" if args.device.startswith("cuda") else "cpu")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Config) if getattr(args, f.name) is not None}
    weights = [number("past_weight", w) for w in given.pop("past_weight", "").split(",") if w]
    need(all(0 <= w < math.inf for w in weights) and len(set(weights)) == len(weights),
         f"--past-weight is {args.past_weight}; each value must be 0 or more, and there once.")
    need(not weights or "bomla" in args.methods, "--past-weight is BomLA's, and bomla is not among the --methods.")
    special = experiment.settings | (experiment.cpu if args.schedule == "cpu" else {})
    if special.get("iterations", "").count(",") not in (0, len(args.sequence) - 1):  # meant for another sequence
        del special["iterations"]
    cfg = dataclasses.replace(Config(), **SCHEDULES[args.schedule] | special | given)
    bomla = ["bomla" if w == cfg.past_weight else f"bomla@{w!r}".removesuffix(".0") for w in weights or [cfg.past_weight]]
    args.methods = [m for method in args.methods for m in (bomla if method == "bomla" else [method])]
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        fine = isinstance(value, (str, bool)) or 0 < value < math.inf or field.name == "initial_logvar"
        fine = fine or field.name == "merge_rank" and value == 0
        need(fine and value == value, f"{option(field.name)} is {value}; it is out of range.")
    for field, text in (("jacobian_rate", cfg.jacobian_rate or "0"), ("kl_weight", cfg.kl_weight)):
        value = number(field, KL_WEIGHTS.get(text, text))
        need(0 <= value < math.inf, f"{option(field)} is {text}; it must be 0 or more.")
    need(cfg.averaging in ("averages", "products"), f"--averaging is {cfg.averaging!r}; it must be averages or products.")
    given_settings(cfg, len(args.sequence))  # before anything is downloaded
    need(cfg.split in ("test", "val"), f"--split is {cfg.split!r}; it must be test or val.")
    return args, cfg


def work(args, cfg: Config, method: str, seed: int, queue):
    """One run, in a process of its own unless under torchrun: its progress, end or problem goes to the queue."""
    job, stop, parent = f"{method}-{seed}", [], multiprocessing.parent_process()
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and passes it on as SIGTERM
        signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
        torch.set_num_threads(1)  # two runs side by side on one thread each beat one run on two

    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not args.deterministic

    def tell(share, text):
        queue.put((job, share, text))
        return bool(stop) or parent is not None and not parent.is_alive()

    try:
        sequence = judges = load_sequence(args.sequence, cfg, args.data, args.device)
        facts = dict(experiment=args.experiment, method=method, seed=seed, schedule=args.schedule)
        facts |= dict(data=kind_of(sequence), settings=digest(cfg, sequence))
        if args.experiment == "omniglot":
            sequence, *judges = task_sequence(sequence[0], cfg, seed)
        if "@" in method:
            cfg = dataclasses.replace(cfg, past_weight=float(method.split("@")[1]))
        run(cfg, facts, sequence, judges, args.out / args.experiment / job, tell, args.fresh)
        stopped = (job, None, f"The run {job} was stopped; the same command, without --fresh, goes on.")
        queue.put(stopped if stop else (job, 1.0, ""))
    except (Problem, OSError) as problem:
        queue.put((job, None, str(problem)))
    except Exception as error:  # a mistake of this program: say where
        traceback.print_exc()
        queue.put((job, None, f"{job} failed ({type(error).__name__}: {error})"))


class Progress:
    """One line with the estimated end: rewritten in place on a terminal, now and then in a log."""

    def __init__(self, jobs: list[str]):
        self.share, self.begun, self.start, self.said = dict.fromkeys(jobs, 0.0), {}, time.time(), 0.0
        self.text: dict[str, str] = {}

    def tell(self, job: str, share: float, text: str):
        self.begun.setdefault(job, share)  # a resumed run begins part of the way
        self.share[job], self.text[job] = share, text or ("" if share == 1 else self.text.get(job, job))
        every = 0.2 if sys.stderr.isatty() else 30
        if time.time() - self.said < every:
            return
        self.said = time.time()
        fresh = sum(self.share[j] - self.begun[j] for j in self.begun)
        left = (len(self.share) - sum(self.share.values())) * (time.time() - self.start) / max(fresh, 1e-9)
        end = time.strftime("%H:%M", time.localtime(time.time() + left)) if fresh > 0.01 else "..."
        running = " | ".join(t for t in self.text.values() if t)
        line = f"{100 * sum(self.share.values()) / len(self.share):3.0f} %, done about {end}: {running}"
        before, after = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
        print(before + line, end=after, file=sys.stderr, flush=True)


def main(argv: list[str]):
    args, cfg = parse(argv)
    if args.experiment == "approximation":
        return print(approximation(args.out))
    if args.experiment == "claims":
        return show_claims(args.out)
    if TORCHRUN:
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        fewest = min(cfg.eval_tasks, cfg.hessian_tasks)
        need(fewest >= RANKS, f"{RANKS} processes are too many for {fewest} tasks of evaluation or curvature.")
        if RANK:
            sys.stdout = open(os.devnull, "w")
    if args.prepare and not RANK:
        wanted = [n for n in args.sequence if n in data_prep.UNPACK]
        if wanted:
            data_prep.main(wanted + ["--data", str(args.data)])
    wait()  # for what the first prepares
    sequence = load_sequence(args.sequence, cfg, args.data)  # any problem with the data shows before the work starts
    folder = args.out / args.experiment
    pairs = [(m, int(s)) for s in args.seeds for m in args.methods]
    print(f"{args.experiment}, {args.schedule} schedule on {args.device}: meta-batches of {cfg.meta_batch} tasks, "
          f"{cfg.way}-way {cfg.shot}-shot, {cfg.query} queries per class; records in {folder}/")
    for d in sequence:
        classes = "/".join(str(d.setting.turns * len(d.splits[s])) for s in ("train", "val", "test"))
        k = d.setting
        print(f"  {d.name} ({d.kind}): {classes} classes, {len(d.images):,} images; {k.iterations} iterations, "
              f"alpha {k.inner_rate:g}, k = {k.inner_steps}, in evaluation {k.eval_steps}", flush=True)
    like = dict(schedule=args.schedule, data=kind_of(sequence), settings=digest(cfg, sequence))
    show = lambda: print("\n" + report(folder, like) + "\n", flush=True)
    problems = (run_together if TORCHRUN else run_all)(args, cfg, pairs, show)
    need(not problems, " ".join(problems))
    rows = json.loads((folder / "summary.json").read_text())["claims"] if not RANK else []
    if rows:
        print(f"The paper's claims (effect in points of accuracy, 95 % interval):\n{claims_table(rows)}\n")
    print(f"{folder}/summary.json and the figures beside it are written.")
    wait()  # for the first's report
    if TORCHRUN:
        torch.distributed.destroy_process_group()  # else torch may abort a process at its exit


def run_together(args, cfg: Config, pairs: list[tuple[str, int]], show) -> list[str]:
    """Under torchrun: every method and seed after the other, by all processes together."""
    progress = Progress([f"{m}-{s}" for m, s in pairs])

    class Here:  # stands in for the queue
        def put(_, message):
            job, share, text = message
            need(share is not None, text)  # a problem of one process ends them all
            if RANK == 0:
                progress.tell(job, share, text)
                if not text:
                    show()

    for m, s in pairs:
        work(args, cfg, m, s, Here())
    return []


def run_all(args, cfg: Config, pairs: list[tuple[str, int]], show) -> list[str]:
    """Every method and seed in a process of its own, some at a time; returns what went wrong."""
    jobs = args.jobs or (1 if args.device.startswith("cuda") else os.cpu_count())
    context = multiprocessing.get_context("spawn")
    queue, waiting, running, problems = context.Queue(), list(pairs), {}, []
    progress, shown = Progress([f"{m}-{s}" for m, s in pairs]), 0.0
    while waiting or running:
        while waiting and len(running) < jobs:
            m, s = waiting.pop(0)
            running[f"{m}-{s}"] = context.Process(target=work, args=(args, cfg, m, s, queue), daemon=True)
            running[f"{m}-{s}"].start()
        for job in [j for j, process in running.items() if process.exitcode]:  # killed: no last words are to come
            problems.append(f"The run {job} was killed; the same command, without --fresh, goes on from its last checkpoint.")
            del running[job]
        try:
            job, share, text = queue.get(timeout=2)
        except Empty:
            continue
        if job not in running:
            continue
        if share is None:
            problems.append(text)
            running.pop(job).join()
            continue
        progress.tell(job, share, text)
        if not text:  # the end of a stage
            if share == 1.0 or time.time() > shown + 30:
                show()
                shown = time.time()
            if share == 1.0:
                running.pop(job).join()
    return problems


class Stopped(BaseException):
    """By a signal, whose number it holds."""


def stop(number, _):
    signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise Stopped(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGINT, stop)
    try:
        main(sys.argv[1:])
    except (Problem, OSError) as problem:
        print(f"boml: {problem}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        for process in multiprocessing.active_children():
            process.terminate()
        for process in multiprocessing.active_children():  # each finishes its iteration and writes a checkpoint
            process.join()
        print("\nboml: stopped; the same command, without --fresh, goes on from here.", file=sys.stderr)
        sys.exit(128 + stopped.args[0])
