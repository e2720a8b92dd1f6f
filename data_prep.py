"""What comes before a run, around it, and after it.

Before: make data/<name>.npz, from the official archives, drawn by this program, or from a folder.

    python data_prep.py                    download what can be had, pack it, print what is there
    python data_prep.py --raw DIR          take the archives from a folder instead
    python data_prep.py omniglot cifar_fs  only these

Around: prepare what `boml.py triathlon ...` needs, and start it for each method, seed and lambda.

    python data_prep.py launch triathlon ...

After: judge what the runs have recorded; put a run's network to use.

    python data_prep.py report             tables, verdicts on the paper's claims, and figures
    python data_prep.py classify ...       tell the classes of one's own images

Archives are found in --raw DIR or downloaded to <data>/raw (resumed when cut, checked by md5). They
are read in place, never unpacked, and no pickle is ever loaded.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import argparse, csv, dataclasses, hashlib, html, http.client, io, itertools, json, math, os, re, stat
import subprocess, sys, tarfile, tempfile, time, zipfile, zlib
import urllib.error, urllib.parse, urllib.request
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

import boml
from boml import Problem, brief, need

SOURCES = {  # dataset: (address, md5 of the official file) of each of its archives
    "omniglot": [
        ("https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
         "68d2efa1b9178cc56df9314c21c6e718"),
        ("https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
         "6b91aef0f799c5bb55b94e3f2daec811"),
    ],
    "mini_quickdraw": [
        ("https://raw.githubusercontent.com/googlecreativelab/quickdraw-dataset/master/categories.txt", None),
        ("https://storage.googleapis.com/quickdraw_dataset/full/numpy_bitmap/", None),
    ],
    "cifar_fs": [
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ],
    "vgg_flowers": [
        ("https://www.robots.ox.ac.uk/~vgg/data/flowers/102/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa"),
        ("https://www.robots.ox.ac.uk/~vgg/data/flowers/102/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
    ],
    "aircraft": [
        ("https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
         "d4acdd33327262359767eeaa97a4f732"),
    ],
}
COUNTS = {  # classes for training, validation and test
    "omniglot": (1100, 100, 423), "omniglot_alphabets": (1195, 206, 222), "mini_quickdraw": (241, 52, 52),
    "cifar_fs": (64, 16, 20), "mini_imagenet": (64, 16, 20), "vgg_flowers": (66, 16, 20),
    "aircraft": (64, 16, 20), "generated_characters": (220, 40, 80), "generated_doodles": (200, 40, 60),
    "generated_textures": (200, 40, 60), "generated_scenes": (64, 16, 20),
    "generated_blossoms": (66, 16, 20), "generated_aeroplanes": (64, 16, 20),
    "generated_alphabets": (200, 70, 70),
}
HELD_OUT = {  # the authors' classes for validation and for test; all others are for training
    "mini_quickdraw": (
        "The Great Wall of China, airplane, ant, barn, belt, bucket, butterfly, camouflage, "
        "compass, cooler, cruise ship, door, drums, elephant, face, flower, foot, fork, "
        "grapes, hamburger, hockey puck, knife, lion, lollipop, map, mermaid, microphone, "
        "mouse, mushroom, onion, pig, pool, popsicle, rhinoceros, rifle, shorts, shovel, "
        "skateboard, snail, snowflake, squiggle, star, string bean, sweater, swing set, tent, "
        "toaster, toilet, tornado, tractor, whale, windmill",
        "angel, animal migration, backpack, banana, baseball, bed, binoculars, bird, "
        "blackberry, boomerang, bread, camel, carrot, circle, clarinet, coffee cup, cookie, "
        "donut, dresser, drill, fire hydrant, garden, garden hose, goatee, grass, helicopter, "
        "helmet, hot dog, lantern, lighter, line, mailbox, mug, owl, paper clip, parrot, "
        "passport, pear, piano, pineapple, pliers, purse, rain, rollerskates, sink, stitches, "
        "syringe, table, tennis racquet, underwear, vase, waterslide",
    ),
    "cifar_fs": (
        "beaver, beetle, butterfly, camel, cattle, crab, crocodile, flatfish, lamp, "
        "maple_tree, motorcycle, otter, sea, shark, television, tractor",
        "baby, bed, bicycle, chimpanzee, fox, leopard, man, pickup_truck, plain, poppy, "
        "rocket, rose, snail, sweet_pepper, table, telephone, wardrobe, whale, woman, worm",
    ),
    "mini_imagenet": (
        "n01855672, n02091244, n02114548, n02138441, n02174001, n02950826, n02971356, "
        "n02981792, n03075370, n03417042, n03535780, n03584254, n03770439, n03773504, "
        "n03980874, n09256479",
        "n01930112, n01981276, n02099601, n02110063, n02110341, n02116738, n02129165, "
        "n02219486, n02443484, n02871525, n03127925, n03146219, n03272010, n03544143, "
        "n03775546, n04146614, n04149813, n04418357, n04522168, n07613480",
    ),
    "vgg_flowers": (
        "003, 007, 012, 018, 021, 028, 043, 046, 048, 064, 065, 069, 084, 096, 098, 099",
        "002, 011, 014, 015, 024, 029, 034, 035, 036, 037, 042, 044, 053, 055, 063, 066, 070, "
        "076, 086, 087",
    ),
    "aircraft": (
        "767-200, 767-400, 777-300, A310, A330-300, A340-200, ATR-42, Beechcraft 1900, Cessna "
        "525, Cessna 560, Challenger 600, E-170, F/A-18, Gulfstream IV, MD-87, Metroliner",
        "727-200, 737-200, 737-300, 737-900, 747-400, A340-300, BAE 146-200, Boeing 717, "
        "C-47, DC-10, E-195, Eurofighter Typhoon, Falcon 2000, Fokker 100, Fokker 70, Hawk "
        "T1, L-1011, Saab 2000, Tu-154, Yak-42",
    ),
    "omniglot_alphabets": (  # by alphabet, Appendix C.4
        "Anglo-Saxon_Futhorc, Arcadian, Blackfoot_(Canadian_Aboriginal_Syllabics), Cyrillic, "
        "Ge_ez, Glagolitic, N_Ko",
        "Atemayar_Qelisayer, Futurama, Greek, Mkhedruli_(Georgian), Syriac_(Estrangelo), "
        "Syriac_(Serto), Tagalog, Tibetan",
    ),
}
OMNIGLOT = (  # alphabet: numbers of its characters for validation | for test
    "Angelic: 17 | 5 6 9 12; Anglo-Saxon_Futhorc: 12 20 26 | 6 15 22 24 28 29; Arcadian: 18 | "
    "2 5 10 12 15 19 23; Armenian: 15 18 24 | 1 2 3 5 10 11 12 13 17 19 25 30 38 41; "
    "Asomtavruli_(Georgian): 3 8 13 28 30 31 | 1 2 7 10 14 18 19 22 23 25 26 32 33; "
    "Atemayar_Qelisayer: 14 16 | 1 7 8 10 19 20 22; Atlantean: 6 | 9 14 19 21; Aurek-Besh: 1 "
    "16 21 | 3 9 10 11 17 23 26; Avesta: 13 17 19 | 2 4 5 8 11 15; Balinese: 15 | 6 9 16 21 "
    "22 23; Bengali: 2 13 16 20 26 | 1 3 8 11 22 34 36 37 41; "
    "Blackfoot_(Canadian_Aboriginal_Syllabics): 5 8 | 3 6; Braille: 3 | 11 15 24; "
    "Burmese_(Myanmar): 8 13 34 | 1 6 7 17 22 26 30 33; Cyrillic: 11 | 2 3 7 17 19 26 31; "
    "Futurama: 1 18 26 | 6 7 9 22; Ge_ez: 9 | 2 8 20; Glagolitic: 23 | 2 4 7 8 10 13 21 28 29 "
    "30 35; Grantha: 23 28 | 2 7 9 15 17 18 24 27 36 42; Greek: 18 | 5 8 20; Gujarati: 7 8 13 "
    "27 | 18 19 23 25 29 31 32 34 39 40 47 48; Gurmukhi: 3 8 | 2 4 5 16 18 32 33 36 38 39 40 "
    "42 44; Hebrew: 5 13 19 | 1 2 8 11 15 20 22; Japanese_(katakana): 19 | 1 2 6 11 15 16 20 "
    "22 23 29 42 45 46; Kannada: 19 40 | 1 2 3 5 12 14 17 18 23 24 28 29 30 32; Keble: 16 | 4 "
    "6 11 12 20 22 23 24; Korean: 18 | 2 4 6 13 19 21 23 24 25 26 31 35 37 39; Latin: 14 | 3 "
    "4 6 7 16 17 24; Malay_(Jawi_-_Arabic): 4 6 | 2 5 10 11 12 17 22 29 31 34 35 38 39; "
    "Malayalam: 8 15 25 28 29 | 1 7 9 18 19 21 23 24 26 27 32 33 34 36 37 39 47; Manipuri: 12 "
    "17 18 29 | 2 4 6 10 11 20 27 28 31 35; Mkhedruli_(Georgian): 34 38 | 1 2 5 6 10 11 16 18 "
    "22 26 29 31 35; N_Ko: 2 | 4 9 12 19 22 31 33; Ojibwe_(Canadian_Aboriginal_Syllabics): 7 "
    "11 | 4 6 10; Old_Church_Slavonic_(Cyrillic): 1 7 10 23 29 31 | 2 14 17 19 20 24 25 30 35 "
    "40 43; Oriya: 20 26 | 1 3 6 8 10 15 23 24 28 31 33 38 39 42; Sanskrit: 1 4 9 | 2 10 13 "
    "16 17 19 20 22 32 36 39; Sylheti: 2 10 17 | 3 6 13 15 21 26 27; Syriac_(Estrangelo): 22 "
    "| 2 3 4 7 8 11 14 18; Syriac_(Serto): 5 18 23 | 2 3 6 8 9 22; Tibetan: 13 22 | 6 10 12 "
    "14 17 18 23 30 31 35 36 37 41; Tifinagh: 13 27 34 50 | 1 9 11 17 19 22 23 28 33 44 52; "
    "ULOG: 4 | 3 6 10 18 19 22 23 24 26; Alphabet_of_the_Magi: - | 9 13 14 16 17 19 20; "
    "Early_Aramaic: - | 5 8 10 13 17 22; Inuktitut_(Canadian_Aboriginal_Syllabics): - | 6 8 "
    "10; Japanese_(hiragana): - | 3 8 9 19 25 38 39 42 47 49 50; Mongolian: - | 2 3 5 6 8 12 "
    "15 25 27 28 29 30; Tagalog: - | 14 15 17; Tengwar: - | 7 8 10 15 18 22"
)
DRAWINGS = 1000  # of each QuickDraw class
TIMEOUT = 8  # seconds without a byte
LARGEST = 256 << 20  # bytes: no single file of these archives comes near


class Unreachable(Exception):
    """No network, or the server is not there: the dataset is left out."""


# --------------------------------------------------------------------------------------------------- Obtaining


def md5_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def download(url: str, path: Path, md5: str | None = None, size: int | None = None, check=None) -> Path:
    """Fetch url, or its first `size` bytes, to path: resumed when cut, checked, and only then given its name."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    stalled = 0
    while stalled < 3:  # give up after three attempts in a row that brought nothing
        have = part.stat().st_size
        try:
            if have == size or fetch(url, part, have, size):
                break
        except urllib.error.HTTPError as error:
            if error.code == 416 and have:  # asked to go on from beyond the end: the part is whole, or not ours
                break
            if have == 0:
                part.unlink()
            raise Unreachable(f"the server answers {error.code} for {url}")
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            if part.stat().st_size == 0:
                part.unlink()
                why = str(getattr(error, "reason", error)) or type(error).__name__
                raise Unreachable(f"{urllib.parse.urlsplit(url).netloc} cannot be reached ({why}); run again with a "
                                  "network, or get the archive elsewhere and use --raw DIR")
        stalled = stalled + 1 if part.stat().st_size == have else 0
        time.sleep(0.2 * stalled)
    else:
        raise Unreachable(f"{url} was cut off {stalled} times at byte {have:,}; run again to go on from there")
    found = md5_of(part) if md5 else None
    if found != md5 or check and not check(part.read_bytes()):
        part.unlink()
        wrong = f"has md5 {found}, not {md5}" if md5 else "does not hold what it should"
        raise Problem(f"{url} {wrong}: the download was deleted; run again, or use --raw DIR.")
    os.replace(part, path)
    return path


def fetch(url: str, part: Path, have: int, size: int | None) -> bool:
    """Append the rest of url to part; True when all of it is there."""
    request = urllib.request.Request(url, headers={"User-Agent": "boml"})
    if have or size:
        request.add_header("Range", f"bytes={have}-{size - 1 if size else ''}")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        if reply.status != 206:  # the server sends the file from its start
            have = 0
        left = reply.headers.get("Content-Length")
        total = have + int(left) if left else None
        with open(part, "r+b") as file:
            file.seek(have)
            file.truncate()
            while block := reply.read(min(1 << 16, size - file.tell()) if size else 1 << 16):
                file.write(block)
                progress(part.name.removesuffix(".part"), file.tell(), total)
            return file.tell() == size or total is None or file.tell() >= total


def progress(name: str, done: int, total: int | None):
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total) if total else ""
        of = f" of {total / 1e6:.1f}" if total else ""
        print(f"\r{name} [{bar:30}] {done / 1e6:.1f}{of} MB ", end="\n" if done == total else "", file=sys.stderr)


def obtain(name: str, raw: Path | None, cache: Path) -> list[Path]:
    """The archives of a dataset that is one or more whole files."""
    paths = []
    for url, md5 in SOURCES[name]:
        file = url.rsplit("/", 1)[1]
        found = sorted(raw.rglob(file)) if raw else [cache / file] if (cache / file).exists() else []
        if raw and not found:
            raise Unreachable(f"{file} is not in {raw}; put it there, or leave --raw out to download it")
        path = found[0] if found else download(url, cache / file, md5)
        if found and md5_of(path) != md5:
            print(f"{name}: {path} is not the official file (its md5 differs); used as it is.",
                  file=sys.stderr)
        paths.append(path)
    return paths


# --------------------------------------------------------------------------------------------------- Unpacking
# One function per dataset: yields (class name, 28x28[x3] uint8). Archives are read in place, never unpacked to disk.


def shrink(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((28, 28), Image.Resampling.BILINEAR))


def picture(path: Path, member: str, data: bytes, mode: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
        need(image.width * image.height <= 1 << 26, "it has more than 67 million pixels")
        return image.convert(mode)
    except Exception as error:  # Pillow raises almost anything on bad bytes
        raise Problem(f"{path} holds {member}, which is not a readable image ({brief(error)}); get it again.")


def sane(path: Path, name: str, size: int, link: bool):
    """Refuse what no honest archive of images holds, though nothing is ever unpacked to disk."""
    parts = name.replace("\\", "/").split("/")
    if link or ".." in parts or parts[0] == "" or ":" in parts[0] or size > LARGEST:
        what = "a link" if link else f"{size:,} bytes long" if size > LARGEST else "outside of it"
        raise Problem(f"{path} holds {name[:100]!r}, which is {what}; get the archive from a source you trust.")


def members(path: Path):
    """(name, bytes) of every file of a zip, a tar or a folder, in its order; read in place."""
    if path.is_dir():
        yield from ((file.relative_to(path).as_posix(), file.read_bytes()) for file in sorted(path.rglob("*.*")))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                sane(path, member.filename, member.file_size, stat.S_ISLNK(member.external_attr >> 16))
            for member in archive.infolist():
                yield member.filename, archive.read(member)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                sane(path, member.name, member.size, not (member.isfile() or member.isdir()))
                if member.isfile():
                    yield member.name, archive.extractfile(tarfile.data_filter(member, ".")).read()


def omniglot(raw, cache):
    """images_background/<alphabet>/<character>/<drawing>.png, 105x105, dark strokes on white."""
    for path in obtain("omniglot", raw, cache):
        for name, data in members(path):
            if name.endswith(".png"):
                _, alphabet, character, _ = name.split("/")
                yield f"{alphabet}/{character}", shrink(picture(path, name, data, "L"))


def npy_header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    return read[np.lib.format.read_magic(file)[0]](file)


def mini_quickdraw(raw, cache):
    """<class>.npy, (drawings, 784) uint8, bright strokes on black: turned to dark on white as Omniglot has them."""
    for path in quickdraw_files(raw, cache):
        with open(path, "rb") as file:
            shape, fortran, dtype = npy_header(file)
            if len(shape) != 2 or shape[1] != 784 or dtype != np.uint8 or fortran:
                raise Problem(f"{path} holds {dtype} of shape {shape}, not drawings (n, 784) uint8; get it again.")
            rows = min(shape[0], DRAWINGS)
            data = file.read(rows * 784)
        if len(data) < rows * 784:
            raise Problem(f"{path} is cut off after {len(data):,} of {rows * 784:,} bytes; get it again.")
        for drawing in 255 - np.frombuffer(data, np.uint8).reshape(rows, 28, 28):
            yield path.stem, drawing


def quickdraw_files(raw, cache) -> list[Path]:
    if raw:
        paths = sorted(raw.rglob("*.npy"))
        if not paths:
            raise Unreachable(f"no <class>.npy is in {raw}")
        return paths
    (listing, _), (base, _) = SOURCES["mini_quickdraw"]
    names = cache / "quickdraw" / "categories.txt"
    if not names.exists():
        download(listing, names, check=lambda data: data.count(b"\n") in (344, 345) and b"<" not in data)
    paths = [cache / "quickdraw" / f"{c}.npy" for c in names.read_text().splitlines()]
    for path in paths:  # the files have 100 MB each: only the header and the first 1000 drawings are fetched
        if not path.exists():
            beginning = 128 + DRAWINGS * 784
            download(base + urllib.parse.quote(path.name), path, None, beginning, lambda data: data[:6] == b"\x93NUMPY")
    return paths


def cifar_fs(raw, cache):
    """CIFAR-100's binary archive: per image a coarse label, a fine label and 3x32x32 bytes."""
    (path,) = obtain("cifar_fs", raw, cache)
    wanted = [f"cifar-100-binary/{file}" for file in ("fine_label_names.txt", "train.bin", "test.bin")]
    files = {name.rsplit("/")[1]: data for name, data in members(path) if name in wanted}
    names = files["fine_label_names.txt"].decode().split()
    for part in ("train.bin", "test.bin"):
        for row in np.frombuffer(files[part], np.uint8).reshape(-1, 3074):
            image = Image.fromarray(row[2:].reshape(3, 32, 32).transpose(1, 2, 0))
            yield names[row[1]], shrink(image)


def mini_imagenet(raw, cache):
    """<wnid>/<image>.jpg in mini_imagenet.tar or a folder mini_imagenet; one of the images is grey."""
    found = [p for p in sorted((raw or cache).rglob("mini_imagenet*")) if p.suffix == ".tar" or any(p.glob("n*/*.jpg"))]
    if not found:
        raise Unreachable(f"ImageNet's terms allow no free download; get it from image-net.org, put its images as "
                          f"mini_imagenet/<wnid>/*.jpg into a folder DIR, then: bash run.sh data mini_imagenet --raw DIR")
    for name, data in members(found[0]):
        if name.endswith(".jpg"):
            yield name.split("/")[-2], shrink(picture(found[0], name, data, "RGB"))


def vgg_flowers(raw, cache):
    """jpg/image_00001.jpg and on; their classes, 1 to 102, in the MATLAB file."""
    path, labels = obtain("vgg_flowers", raw, cache)
    labels = read_mat(labels)["labels"]
    for name, data in members(path):
        if name.endswith(".jpg"):
            yield f"{labels[int(name[-9:-4]) - 1]:03d}", shrink(picture(path, name, data, "RGB"))


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays, flat, of a MATLAB v5 file: 128 bytes of header, then elements, some compressed."""
    kinds = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}

    def elements(data: bytes):
        at = 0
        while at + 8 <= len(data):
            kind, size = np.frombuffer(data, "<u4", 2, at).tolist()
            if kind >> 16:  # a small element: size and kind share a word, up to four bytes follow
                yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
                at += 8
            else:
                yield kind, data[at + 8 : at + 8 + size]
                at += 8 + (size if kind == 15 else -(-size // 8) * 8)

    arrays = {}
    for kind, data in elements(path.read_bytes()[128:]):
        if kind == 15:
            ((kind, data),) = elements(zlib.decompressobj().decompress(data, LARGEST))
        if kind == 14:  # a matrix: flags, shape, name, values
            _, _, (_, name), (kind, values) = list(elements(data))[:4]
            arrays[name.decode()] = np.frombuffer(values, "<" + kinds[kind])
    return arrays


def aircraft(raw, cache):
    """data/images/<number>.jpg with a banner of 20 pixels at the bottom; data/images_variant_*.txt: number, variant."""
    (path,) = obtain("aircraft", raw, cache)
    lists = [data.decode() for name, data in members(path) if "/images_variant_" in name]
    variant = dict(line.split(" ", 1) for text in lists for line in text.splitlines())
    for name, data in members(path):
        if name.endswith(".jpg"):
            image = picture(path, name, data, "RGB")
            yield variant[name[-11:-4]], shrink(image.crop((0, 0, image.width, image.height - 20)))


# ---------------------------------------------------------------------------------------------------- Drawing
# Generated datasets, which stand in for those that cannot be had: each function yields (28x28[x3] uint8, class).


def wobble(rng, points, jitter, turn, stretch):
    """One person's hand: jitter points (n, 2) of the square [-1, 1]^2, then turn, stretch and shift them all."""
    a = rng.normal(0, turn)
    turned = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]) @ (np.eye(2) + rng.normal(0, stretch, (2, 2)))
    return (points + rng.normal(0, jitter, points.shape)) @ turned.T + rng.normal(0, stretch / 2, 2)


def ink(lines, width):
    """Dark lines on white, drawn at three times the size for smooth edges."""
    image = Image.new("L", (84, 84), 255)
    for line in lines:
        ImageDraw.Draw(image).line([tuple(p) for p in (line * 0.75 + 1) * 42], 0, width, joint="curve")
    return np.asarray(image.resize((28, 28), Image.Resampling.BILINEAR))


def draw_characters(rng, classes, each=20):
    """A class is two to four curved strokes; each drawing bends, turns and stretches them."""
    t = np.linspace(0, 1, 12)[:, None]
    bezier = np.concatenate([(1 - t) ** 2, 2 * t * (1 - t), t * t], 1)  # (12, 3)
    for c in range(classes):
        knots = rng.uniform(-1, 1, (rng.integers(2, 5), 3, 2))
        for _ in range(each):
            hand = wobble(rng, knots.reshape(-1, 2), 0.1, 0.12, 0.12).reshape(knots.shape)
            yield ink(bezier @ hand, int(rng.integers(4, 7))), c


def draw_doodles(rng, classes, each=30):
    """A class is two to four outlines of polygons; each doodle moves, scales, mirrors them and adds a stray line."""
    for c in range(classes):
        parts = [(rng.integers(3, 8), rng.uniform(-0.5, 0.5, 2), rng.uniform(0.2, 0.6, 2), rng.uniform(0, 6.3))
                 for _ in range(rng.integers(2, 5))]
        for _ in range(each):
            lines = [rng.uniform(-1, 1, 2) + rng.normal(0, 0.3, (4, 2))]
            for corners, centre, radius, phase in parts:
                t = np.linspace(0, 2 * np.pi, corners + 1)[:, None] + phase
                size = radius * rng.lognormal(0, 0.25)
                lines.append(centre + rng.normal(0, 0.12, 2) + size * np.concatenate([np.cos(t), np.sin(t)], 1))
            hand = wobble(rng, np.concatenate(lines), 0.04, 0.3, 0.15) * [rng.choice([-1, 1]), 1]
            yield ink(np.split(hand, np.cumsum([len(line) for line in lines])[:-1]), int(rng.integers(2, 5))), c


def draw_textures(rng, classes, each=40):
    """A class is two colours and a pattern of waves; each image shifts both, adds noise and hides a disc of it."""
    y, x = np.mgrid[-1:1:28j, -1:1:28j]
    for c in range(classes):
        colours, pitch, angle = rng.uniform(40, 215, (2, 3)), rng.uniform(2, 9), rng.uniform(0, np.pi)
        mix, sharp = rng.uniform(0, 1), rng.uniform(0.5, 4)
        for _ in range(each):
            a, f, shift = angle + rng.normal(0, 0.25), pitch * rng.lognormal(0, 0.15), rng.uniform(0, 6.3, 3)
            along, across = np.cos(a) * x + np.sin(a) * y, np.cos(a) * y - np.sin(a) * x
            wave = (1 - mix) * np.sin(f * along + shift[0])
            wave += mix * np.sin(1.3 * f * across + shift[1]) * np.sin(2 * x + shift[2])
            m = 1 / (1 + np.exp(-sharp * wave))[..., None]
            light, dark = colours + rng.normal(0, 28, (2, 3))
            image = (m * light + (1 - m) * dark) * rng.uniform(0.6, 1.2) + rng.normal(0, 22, (28, 28, 3))
            (u, v), radius = rng.uniform(-0.7, 0.7, 2), rng.uniform(0.2, 0.5)
            image[(x - u) ** 2 + (y - v) ** 2 < radius**2] = rng.uniform(20, 235, 3)
            yield image.clip(0, 255).astype(np.uint8), c


def ring(corners, phase):
    t = np.linspace(0, 2 * np.pi, corners, endpoint=False) + phase
    return np.stack([np.cos(t), np.sin(t)], 1)


def fill(image, outline, colour, rng):
    """A filled outline in [-1, 1]^2, its colour a little off."""
    shade = tuple((np.asarray(colour) + rng.normal(0, 18, 3)).clip(0, 255).astype(int))
    ImageDraw.Draw(image).polygon([tuple(p) for p in (outline + 1) * 14], shade)


def weather(rng, image):
    """Another light, and noise."""
    return (image * rng.uniform(0.6, 1.15) + rng.normal(0, 15, image.shape)).clip(0, 255).astype(np.uint8)


def draw_scenes(rng, classes, each=40):
    """A class is two or three coloured shapes before a sky; each image moves and scales them, and changes the light."""
    for c in range(classes):
        sky = rng.uniform(60, 230, (2, 3))
        shapes = [(rng.integers(3, 7), rng.uniform(-0.5, 0.5, 2), rng.uniform(0.25, 0.6, 2), rng.uniform(20, 235, 3))
                  for _ in range(rng.integers(2, 4))]
        for _ in range(each):
            slope, (low, high) = np.linspace(0, 1, 28)[:, None, None], (sky + rng.normal(0, 40, (2, 3))).clip(0, 255)
            image = Image.fromarray(np.broadcast_to(low * slope + high * (1 - slope), (28, 28, 3)).astype(np.uint8))
            for corners, centre, radius, colour in shapes:
                outline = ring(corners, rng.uniform(0, 6.3)) * radius * rng.lognormal(0, 0.2)
                fill(image, wobble(rng, outline + centre + rng.normal(0, 0.2, 2), 0.05, 0.3, 0.1), colour, rng)
            yield weather(rng, np.asarray(image)), c


def draw_blossoms(rng, classes, each=40):
    """A class is a number of petals, their shape, two colours and a green; each image turns, shifts and scales it."""
    for c in range(classes):
        petals, wide, (petal, heart) = rng.integers(3, 10), rng.uniform(0.15, 0.45), rng.uniform(60, 250, (2, 3))
        green = rng.uniform((20, 60, 10), (90, 140, 70))
        for _ in range(each):
            image, middle = Image.new("RGB", (28, 28), tuple(green.astype(int))), rng.normal(0, 0.15, 2)
            size, turn = rng.lognormal(-0.2, 0.2), rng.uniform(0, 6.3)
            for a in turn + np.arange(petals) * 2 * np.pi / petals:
                along, across = np.array([np.cos(a), np.sin(a)]), np.array([-np.sin(a), np.cos(a)])
                tips = np.stack([0 * along, 0.55 * along + wide * across, along, 0.55 * along - wide * across])
                fill(image, middle + size * tips, petal, rng)
            fill(image, middle + size * 0.25 * ring(8, 0), heart, rng)
            yield weather(rng, np.asarray(image)), c


def draw_aeroplanes(rng, classes, each=40):
    """A class is a fuselage, a sweep of wings and a livery, seen from the side before a sky; a little turned each."""
    for c in range(classes):
        slim, nose, wing, tail = rng.uniform((0.08, 0.1, 0.2, 0.15), (0.22, 0.4, 0.6, 0.5))
        at, sweep, (body, trim) = rng.uniform(-0.3, 0.2), rng.uniform(0.1, 0.5), rng.uniform(30, 250, (2, 3))
        parts = [([(-1, slim), (1 - nose, slim), (1, 0), (1 - nose, -slim), (-1, -slim)], body),
                 ([(at + 0.3, 0), (at - sweep, wing), (at - sweep - 0.2, wing), (at - 0.1, 0)], trim),
                 ([(-0.7, -slim), (-0.9, -slim - tail), (-1, -slim - tail), (-1, -slim)], trim)]
        for _ in range(each):
            image = Image.new("RGB", (28, 28), tuple(rng.uniform((120, 150, 190), (190, 215, 250)).astype(int)))
            hand = wobble(rng, 0.85 * np.array([p for points, _ in parts for p in points]), 0.03, 0.1, 0.12)
            for (points, colour), outline in zip(parts, np.split(hand, np.cumsum([len(p) for p, _ in parts])[:-1])):
                fill(image, outline, colour, rng)
            yield weather(rng, np.asarray(image)), c


# ----------------------------------------------------------------------------------------------------- Packing

UNPACK = {"omniglot": omniglot, "omniglot_alphabets": omniglot, "mini_quickdraw": mini_quickdraw,
          "cifar_fs": cifar_fs, "mini_imagenet": mini_imagenet, "vgg_flowers": vgg_flowers,
          "aircraft": aircraft}
DRAW = {
    "generated_characters": draw_characters,
    "generated_alphabets": draw_characters,
    "generated_doodles": draw_doodles,
    "generated_textures": draw_textures,
    "generated_scenes": draw_scenes,
    "generated_blossoms": draw_blossoms,
    "generated_aeroplanes": draw_aeroplanes,
}


def held_out(name: str) -> tuple[set[str], set[str]]:
    """The classes of a dataset for validation and for test, by name."""
    if name != "omniglot":
        return tuple(set(part.split(", ")) for part in HELD_OUT[name])
    parts = set(), set()
    for line in OMNIGLOT.split("; "):
        alphabet, numbers = line.split(": ")
        for part, listed in zip(parts, numbers.split(" | ")):
            part |= {f"{alphabet}/character{int(n):02d}" for n in listed.split() if n != "-"}
    return parts


def split_of(name: str, classes: list[str]) -> np.ndarray:
    """train, val or test for each class."""
    if name in DRAW:
        return np.repeat(boml.SPLITS, COUNTS[name])
    val, test = held_out(name)
    keys = [c.split("/")[0] if name == "omniglot_alphabets" else c for c in classes]
    return np.array(["val" if k in val else "test" if k in test else "train" for k in keys])


def make(name: str, raw: Path | None, data: Path) -> Path:
    """Write data/<name>.npz: images sorted by class, labels, classes, split and origin."""
    if name in DRAW:
        drawn = DRAW[name](np.random.default_rng(0), sum(COUNTS[name]))
        items, source = [(f"{c // 10:02d}/{c % 10}", image) for image, c in drawn], "drawn"
    else:
        try:
            items, source = list(UNPACK[name](raw, data / "raw")), "supplied" if raw else "downloaded"
        except Exception as error:  # the readers of archives raise almost anything on bad bytes
            if isinstance(error, (Problem, Unreachable)) or getattr(error, "errno", None):
                raise  # the last: a full disk, a file that may not be read
            raise Problem(f"{name}: its archive is damaged or not in the official layout "
                          f"({brief(error)}); get it again.")
    items.sort(key=lambda item: item[0])
    classes, labels = np.unique([item[0] for item in items], return_inverse=True)
    need(len(classes) == sum(COUNTS[name]), f"{name}: the archive holds {len(classes)} classes, not "
         f"{sum(COUNTS[name])}; get it again.")
    split = split_of(name, classes.tolist())
    found = tuple((split == s).sum() for s in boml.SPLITS)
    need(found == COUNTS[name], f"{name}: its class names are not the official ones; get it again.")
    data.mkdir(parents=True, exist_ok=True)
    kind = "generated" if name in DRAW else "real"
    with boml.replacing(data / f"{name}.npz") as file:
        np.savez_compressed(file, images=np.stack([item[1] for item in items]), split=split,
                            labels=labels.astype(np.int32), classes=classes, origin=[kind, source])
    return data / f"{name}.npz"


def prepare(name: str, raw: Path | None, data: Path) -> bool:
    """Make one dataset if it is not there, and print a line about it; False if it cannot be had."""
    start, path, state = time.time(), data / f"{name}.npz", "ready"
    row = "{:20}{:>8}{:>9}  {:12}{}".format
    try:
        if raw or not path.exists():
            make(name, raw, data)
            state = f"made in {time.time() - start:.0f} s"
        _, labels, classes, _, origin = boml.read_npz(path)
        print(row(name, f"{len(classes):,}", f"{len(labels):,}", origin[-1], state), flush=True)
        return True
    except Unreachable as error:
        there = path.exists()
        print(row(name, "-", "-", "-", f"{'kept' if there else 'missing'}: {error}."), flush=True)
        return there


# ------------------------------------------------------------------------------ One's own folders

Image.MAX_IMAGE_PIXELS = None  # read_image has its own limit


def read_image(path: Path, folder: Path, channels: int) -> np.ndarray:
    """A picture as 28x28 bytes, upright by its EXIF tag, transparent parts white."""
    inside = path.is_file() and path.resolve().is_relative_to(folder.resolve())
    need(inside, f"{path} is not a regular file inside {folder}; remove it.")
    try:
        with Image.open(path) as image:
            need(image.width * image.height <= 1 << 26, "it has more than 67 million pixels")
            need(image.mode[0] not in "IF", "it has more than 8 bits per channel")
            image = ImageOps.exif_transpose(image).convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("L" if channels == 1 else "RGB")
            return np.asarray(image.resize((28, 28), Image.BILINEAR))
    except Exception as error:  # Pillow raises almost anything on bad bytes
        raise Problem(f"{path} cannot be used as an image ({brief(error)}); remove or replace it.")


def read_classes(path: Path, channels: int):
    """The pictures path/<class>/<picture> as images, labels and class names."""
    classes = sorted(p.name for p in path.iterdir() if p.is_dir() and p.name[0] != ".")
    images, labels, skipped = [], [], Counter()
    for c, name in enumerate(classes):
        for file in sorted((path / name).iterdir()):
            if file.suffix.lower() in Image.registered_extensions():
                images.append(read_image(file, path, channels))
                labels.append(c)
            else:
                skipped[file.suffix or file.name] += 1
        need(c in labels, f"{path / name} holds no images that Pillow can read; add some.")
    for kind, count in skipped.items():
        print(f"{path}: {kind}: {count} file(s) skipped, Pillow cannot read them")
    return np.array(images), np.array(labels), classes


def pack_folder(path: Path, cfg: boml.Config, data: Path) -> Path:
    """data/<name>.npz of one's own pictures: a fifth of the classes, at least N, are for test, up to
    a sixth for validation, chosen by their names alone."""
    images, labels, classes = read_classes(path, cfg.channels)
    n, test = len(classes), max(len(classes) // 5, cfg.way)
    need(n >= 2 * cfg.way, f"{path} has {n} class folders; --way {cfg.way} needs {2 * cfg.way}; "
         f"add some, or use --way {max(n // 2, 2)}.")
    val = min(n // 6, n - test - cfg.way)
    order = np.argsort([hashlib.md5(os.fsencode(name)).hexdigest() for name in classes])
    split = np.empty(n, "U5")
    split[order] = np.repeat(boml.SPLITS, (n - test - val, val, test))
    packed = data / f"{Path(os.path.abspath(path)).name}.npz"  # a link's own name
    need(not packed.exists(), f"two datasets are named {packed.stem}; leave out or rename one.")
    np.savez(packed, images=images, labels=labels, classes=classes, split=split, origin=["own"])
    return packed


# ------------------------------------------------------------------------------------------- Launch


def launch_options():
    parser = boml.Parser("run.sh", usage="bash run.sh EXPERIMENT [options]", add_help=False,
                         description=launch.__doc__, allow_abbrev=False)
    parser.add_argument("--methods", type=boml.several(str), default=tuple(boml.METHODS),
                        help=f"of {','.join(boml.METHODS)} (default: all)")
    parser.add_argument("--seeds", type=boml.several(int), default=(0,), help="default: 0")
    parser.add_argument("--past-weight", type=boml.several(float), help="lambda, one or several")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per core, or GPU)")
    return parser


def launch(argv: list[str]):
    """Prepare the data of an experiment, start its runs side by side and show their table."""
    if {"-h", "--help"} & set(argv):
        launch_options().print_help()
        print("\nFolders of class folders may be in --sequence. boml.py takes, for each run:\n")
        boml.main(["--help"])
    own, rest = launch_options().parse_known_args(argv)
    single = [word for word in rest if word.partition("=")[0] in ("--method", "--seed")]
    need(not single, f"{single} is for boml.py; here it is --methods or --seeds.")
    boml.check("jobs", 1 if own.jobs is None else own.jobs, 1)
    with tempfile.TemporaryDirectory(prefix="boml-") as folder:
        todo = prepare_runs(list(command_lines(own, rest)), Path(folder))
        first, facts = todo[0][0], announce([args for args, _ in todo])
        out, cores = first.out / first.command, os.cpu_count()
        slots = own.jobs or (torch.cuda.device_count() if first.device == "cuda" else cores)
        out.mkdir(parents=True, exist_ok=True)  # fails before any run starts

        def show():
            if runs := read_records(out, facts["settings"]):
                print(f"\n{table(runs)}", flush=True)

        failed = side_by_side(todo, slots, show)
    need(not failed, f"{', '.join(failed)} did not finish, for the reason above.")


def command_lines(own, rest: list[str]):
    """A command line of boml.py for each seed, method and lambda."""
    for method in own.methods:
        need(method in boml.METHODS, f"--methods: {method!r} is not one of "
             f"{', '.join(boml.METHODS)}.")
    weighed = [m for m in own.methods if boml.METHODS[m].posterior is not boml.Posterior]
    need(weighed or not own.past_weight, "--past-weight is for bomla and bomvi; add one.")
    for seed, method in itertools.product(own.seeds, own.methods):
        line = [f"--method={method}", f"--seed={seed}", *rest]
        weights = own.past_weight if own.past_weight and method in weighed else ()
        yield from [[f"--past-weight={weight}", *line] for weight in weights] or [line]


def prepare_runs(lines: list[list[str]], folder: Path) -> list:
    """The command lines of the runs, parsed and as they are, once their datasets are there: a name
    becomes its stand-in's if it cannot be had, and a folder its packed copy, which is gone after
    the runs, as the folder itself may be."""
    todo = [boml.parse(line) for line in lines]
    need(len({args.job.name for args in todo}) == len(todo),
         "--methods, --seeds or --past-weight repeats one; give each once.")
    data, cfg = todo[0].data, todo[0].job.cfg
    need(data.is_dir() or not data.exists(), f"--data {data} is not a folder; name another.")
    begun, names = [boml.begun(args) for args in todo], []
    learned = [[each["name"] for each in listed[:stage]] for listed, stage in begun]
    for j, (name, _) in enumerate(todo[0].sequence):
        stand_in = boml.DATASETS.get(name, boml.OWN).stand_in
        kinds = [each["kind"] for listed, _ in begun for each in listed[j : j + 1]]
        if name not in boml.DATASETS:
            if name and Path(name).is_dir():
                name = str(pack_folder(Path(name), cfg, folder))
        elif stand_in and "generated" in kinds:
            name = stand_in
        elif not all(name in each for each in learned) and not prepare(name, None, data):
            lack = [args.job.name for args, each in zip(todo, learned) if name not in each]
            need(len(lack) == len(todo), f"{name} cannot be had, and only some of these runs have "
                 f"learned it; leave out {', '.join(lack)}.")
            prepare(stand_in, None, data)
            name = stand_in
        names.append(name)
    chosen = [f"--sequence={','.join(names)}", f"--device={todo[0].device}",
              f"--schedule={todo[0].schedule}"]
    return [(boml.parse([*line, *chosen]), [*line, *chosen]) for line in lines]


def announce(todo) -> dict:
    """Check the data and --start-from, say what will run, and return what all records share."""
    args, cfg = todo[0], todo[0].job.cfg
    sequence = boml.load_sequence(args)
    for each in todo:
        boml.starting_point(each)
    facts = boml.shared_facts(args, sequence)
    print(f"{heading(facts)}, on {args.device}: {cfg.way}-way {cfg.shot}-shot, {cfg.query} queries "
          f"per class, meta-batches of {cfg.meta_batch}; results in {args.out / args.command}")
    for d in sequence:
        s, what = d.setting, "its images are gone"
        if d.images is not None:
            classes = "/".join(str(len(d.splits[split])) for split in boml.SPLITS)
            what = f"{classes} classes, {len(d.images):,} images"
        print(f"  {d.name} ({d.kind}): {what}; {s.iterations} iterations, alpha {s.inner_rate:g}, "
              f"k {s.inner_steps} ({s.eval_steps} to evaluate)", flush=True)
    return facts


def side_by_side(todo, slots, show) -> list[str]:
    """Start boml.py with each command line, `slots` at a time, a core or a GPU each; returns the
    names of the runs that failed."""
    running, failed, waiting, free = {}, [], list(todo), list(range(slots))
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", gpus).split(",")
    try:
        while waiting or running:
            while waiting and free:
                (args, line), slot = waiting.pop(0), free.pop(0)
                one = {"OMP_NUM_THREADS": "1"}  # two runs of one thread beat one of two
                if args.device == "cuda":
                    one["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                process = subprocess.Popen([sys.executable, boml.__file__, *line],
                                           stdout=subprocess.DEVNULL, env=os.environ | one)
                running[process] = args.job.name, slot
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                name, slot = running.pop(process)
                free.append(slot)
                if process.returncode:
                    failed.append(name)
                    print(f"boml: {name} has failed ({process.returncode}).", file=sys.stderr)
                if process.returncode == boml.DISK_FAILED:  # it may be full: start no other
                    failed += [args.job.name for args, _ in waiting]
                    waiting.clear()
                show()
    finally:  # also after a signal
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


# ------------------------------------------------------------------------------------------- Report
# Made from the records alone.


def read_records(folder, settings=None):
    """The rows of each record in the folder by (variant, seed); of these settings, else of the most
    frequent ones."""
    found, runs, order = {}, {}, list(boml.METHODS)
    for path in sorted(folder.glob("*/record.jsonl")):
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            for r in rows:
                need(0 <= r["accuracy"] <= 1 and 0 < r["iteration"] <= r["iterations"]
                     and 0 < r["stage"] <= r["stages"] and r["evaluated"] in r["datasets"]
                     and r["newest"] and r["way"] and r["revision"] and r["seed"] >= 0
                     and r["method"] == r["variant"].partition("@")[0]
                     and isinstance(r["settings"], str) and isinstance(r["revision"], str)
                     and float(r["variant"].partition("@")[2] or 0) >= 0
                     and path.parent.name == f"{r['variant']}-{r['seed']}", "a value")
            if rows:
                found[path] = rows
        except Exception as error:
            print(f"left out: {path} ({brief(error)} is wrong in it)")
    counts = Counter(rows[0]["settings"] for rows in found.values())
    settings = settings or max(counts, key=counts.get, default=None)
    for path, rows in found.items():
        if rows[0]["settings"] == settings:
            runs[rows[0]["variant"], rows[0]["seed"]] = rows
        else:
            print(f"left out: {path} (its settings are others)")

    def place(key):  # a method of one's own comes last
        method, _, weight = key[0].partition("@")
        return order.index(method) if method in order else len(order), float(weight or 0), key

    return {key: runs[key] for key in sorted(runs, key=place)}


def label_of(variant):
    method, _, weight = variant.partition("@")
    label = boml.METHODS[method].label if method in boml.METHODS else method
    return label + (f", lambda = {weight}" if weight else "")


def stage_ends(rows):
    """A run's accuracies in % at the ends of its stages, by (stage, dataset)."""
    return {(r["stage"], r["evaluated"]): 100 * r["accuracy"] for r in rows
            if r["iteration"] == r["iterations"]}


def half_width(values):
    """Half of the mean's 95 % interval (Student's t); infinite for fewer than three values."""
    t = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}.get(len(values), 2.26)
    return t * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 2 else math.inf


def plus_minus(half):
    return f" ± {half:.1f}" if math.isfinite(half) else ""


def quarters(stages):
    return sorted({max(1, stages * q // 4) for q in (1, 2, 3, 4)})


def heading(row):
    judges = ", validation classes" if row.get("split") == "val" else ""
    return f"{row['experiment']}, {row['data']} data, {row['schedule']} schedule{judges}"


def table(runs):
    """Accuracy after a dataset's own stage -> after the last; or at quarters of a task sequence."""
    first = next(iter(runs.values()))[0]
    names, stages = first["datasets"], first["stages"]
    columns = {n: [(t, n), (stages, n)][t == stages :] for t, n in enumerate(names, 1)}
    if stages != len(names):
        columns = {f"after task {t}": [(t, names[0])] for t in quarters(stages)}
    lines = [f"{heading(first)}: accuracy in %, 95 % intervals over seeds\n",
             f"| method | seeds | {' | '.join(columns)} |", "|-" * (2 + len(columns)) + "|"]
    for variant in dict.fromkeys(variant for variant, _ in runs):
        seeds, cells = [stage_ends(rows) for (v, _), rows in runs.items() if v == variant], []
        for points in columns.values():
            values = [[ends[p] for ends in seeds if p in ends] for p in points]
            cell = " -> ".join(f"{np.mean(v):.1f}" if v else "not evaluated" for v in values)
            cells.append(cell + plus_minus(half_width(values[-1])))
        done = f"{len(values[-1])} of " if len(values[-1]) < len(seeds) else ""
        lines.append(f"| {label_of(variant)} | {done}{len(seeds)} | {' | '.join(cells)} |")
    revisions = sorted({row["revision"] for rows in runs.values() for row in rows})
    lines += [f"\nRuns of several revisions: {', '.join(revisions)}."] if revisions[1:] else []
    return "\n".join(lines) + "\n"


# What the paper claims, by section, held against the records: keys as in accuracies; "each" stands
# for each past dataset in turn. The margins, in points of accuracy, are ours. Follow-The-Meta-Leader's
# "mixed performance" is no single inequality: of its lines against BomLA some should hold, some fail.

CLAIMS = """
6.1 maml own each > maml end each
6.1 bomla own each < bomla end each + 3
6.1 bomvi own each < bomvi end each + 3
6.1 toe own each < toe end each + 3
6.1 bomla own first < bomla next first + 3
6.1 bomla end each > maml end each
6.1 bomvi end each > maml end each
6.1 bomla end last < maml end last
6.1 bomvi end last < maml end last
6.1 bomla end last > maml end last - 10
6.1 bomvi end last > maml end last - 10
6.1 maml own new > bomla own new
6.1 maml own new > bomvi own new
6.1 maml own new > toe own new
6.1 maml own new > ftml own new
6.1 maml end last > toe early last
6.1 bomla end all > bomvi end all
6.1 bomla end each > ftml end each
6.1 bomla end last > ftml end last
C.3 bomla end all > bomla@1 end all
C.3 bomla end all > bomla@1000 end all
C.3 bomla@1000 end past > bomla end past
C.3 bomla end past > bomla@1 end past
C.3 bomla@1 own new > bomla own new
C.3 bomla own new > bomla@1000 own new
"""
TASK_CLAIMS = """
6.2 bomla last tasks > bomla first tasks
6.2 bomvi last tasks > bomvi first tasks
6.3 maml last tasks > maml first tasks
6.2 toe last tasks < toe first tasks + 1
6.2 bomla last tasks > maml last tasks
6.2 bomla last tasks > ftml last tasks
6.2 bomla last tasks > toe last tasks
6.2 bomvi last tasks > maml last tasks
6.2 bomvi last tasks > ftml last tasks
6.2 bomla last tasks > bomvi last tasks
6.2 bomla last tasks > bomla@1 last tasks
6.2 bomla last tasks > bomla@100 last tasks
"""


def spell_out(claims: str, past: list[str]) -> str:
    """A claim about "each" past dataset as one claim per dataset."""
    lines = [(line, past if " each " in line else [""]) for line in claims.split("\n")]
    return "\n".join(line.replace("each", name) for line, names in lines for name in names)


def accuracies(rows) -> dict[str, float]:
    """A run's accuracies in % by name; nan where it was not evaluated.

    "own X" is right after the stage of X, "end X" after the last stage, where X is a dataset, or the
    mean of the past datasets (all but the last), the new ones (all but the first), all, or the last
    one. "own first" and "next first" are the first dataset's after the first and second stage, "early
    last" the last one's after J iterations of its stage, which only Train-On-Everything exceeds.
    "first tasks" and "last tasks" are the mean over a quarter of a task sequence.
    """
    names, stages, at = rows[0]["datasets"], rows[0]["stages"], stage_ends(rows)
    own, end, q = list(enumerate(names, 1)), [(stages, n) for n in names], max(1, stages // 4)
    tasks = [(t, names[0]) for t in range(1, stages + 1)]
    points = {"own new": own[1:], "end past": end[:-1], "end last": end[-1:], "end all": end,
              "own first": own[:1], "next first": [(2, names[0])],
              "first tasks": tasks[:q], "last tasks": tasks[-q:]}
    points |= {f"own {n}": [p] for n, p in zip(names, own)} | {f"end {p[1]}": [p] for p in end}
    means = {key: float(np.mean([at.get(p, math.nan) for p in some]))
             for key, some in points.items() if some}
    early = [100 * r["accuracy"] for r in rows if r["iteration"] == r["newest"]
             and (r["stage"], r["evaluated"]) == end[-1]]
    return means | {"early last": early[-1] if early else math.nan}


def verdicts(runs, claims):
    """Each claim that the runs speak of, with left minus right, paired by seed; inconclusive if the
    95 % interval holds the margin."""
    lines, missing = ["| section | claim | left - right | seeds | verdict |", "|-|-|-|-|-|"], 0
    found = {key: accuracies(rows) for key, rows in runs.items()}
    pattern = r"(\S+) ((\S+) (\w+ \w+) ([<>]) (\S+) (\w+ \w+)(?: ([+-] \d+))?)"
    for section, claim, a, key_a, sign, b, key_b, margin in re.findall(pattern, claims):
        pairs = [(found[a, seed], found[b, seed]) for v, seed in found if v == a
                 and (b, seed) in found]
        apart = [one.get(key_a, math.nan) - other.get(key_b, math.nan) for one, other in pairs]
        apart = [value for value in apart if not math.isnan(value)]
        if not apart:
            missing += 1
            continue
        mean, half = sum(apart) / len(apart), half_width(apart)
        over = mean - float(margin.replace(" ", "") or 0)
        verdict = "holds" if (over > 0) == (sign == ">") else "fails"
        verdict = verdict if abs(over) > half else "inconclusive"
        effect = f"{mean:+.1f}{plus_minus(half)}"
        lines.append(f"| {section} | {claim} | {effect} | {len(apart)} | {verdict} |")
    if missing:
        lines += ["", f"Claims left out, since their runs are not here or not done: {missing}"]
    return "\n".join(lines)


COLOURS = {"maml": "#d55e00", "bomla": "#222222", "bomvi": "#cc79a7", "toe": "#0072b2",
           "ftml": "#009e73"}
WIDTH = 800  # of a panel, in pixels


def svg_path(d, stroke="none", fill="none", more=""):
    return f"<path d='M{d}' stroke='{stroke}' fill='{fill}' {more}/>"


def svg_text(words, x, y, more=""):
    return f"<text x='{x:.0f}' y='{y:.0f}' {more}>{html.escape(words)}</text>"


def figure(runs) -> str:
    """Accuracy along the training as SVG: a panel per dataset, or one for a task sequence; a line
    per variant, with a band of one standard deviation over seeds."""
    first = next(iter(runs.values()))[0]
    names, stages = first["datasets"], first["stages"]
    title = f"{heading(first)}: accuracy in % along the training"
    svg = [svg_text(title, 40, 16, "font-size='14'")]
    variants = list(dict.fromkeys(variant for variant, _ in runs))
    others = itertools.cycle(["#e69f00", "#56b4e9", "#8c564b", "#7f7f7f"])
    colours = {v: COLOURS.get(v) or next(others) for v in variants}
    x, y = 40, 36
    for v in variants:
        long = 7.3 * len(label_of(v))  # about, in bold
        x, y = (40, y + 18) if x + long > 40 + WIDTH else (x, y)
        svg.append(svg_text(label_of(v), x, y, f"font-weight='bold' fill='{colours[v]}'"))
        x += long + 20
    for j, name in enumerate(names):
        lines = [(colours[v], line) for v in variants for line in curves(runs, v, name)]
        drawn, y = panel(first, j, lines, y)
        svg += drawn
    words = {t + 0.5: name for t, name in enumerate(names)}
    words = {t: f"task {t}" for t in quarters(stages)} if stages != len(names) else words
    for t, word in words.items():
        svg.append(svg_text(word, 40 + WIDTH * t / stages, y + 18, "text-anchor='middle'"))
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH + 70} {y + 30}' "
            "font-size='12' font-family='sans-serif'>\n<rect width='100%' height='100%' "
            "fill='white'/>\n" + "\n".join(svg) + "\n</svg>\n")


def panel(first, j, lines, y):
    """The lines (colour, curve) on the j-th dataset, drawn below y, and the y of the bottom. Its
    own stage is shaded, chance dashed; a task sequence has neither."""
    name, stages, chance = first["datasets"][j], first["stages"], 1 / first["way"]
    is_of_tasks = stages != len(first["datasets"])
    tens = 100 if is_of_tasks else 24  # pixels for 10 points
    reach = [a for _, line in lines for _, mean, sd in line for a in (mean - sd, mean + sd)]
    reach = reach + ([] if is_of_tasks else [chance]) or [0, 1]
    low = math.floor(10 * min(reach))
    high = max(low + 1, math.ceil(10 * max(reach)))
    svg = [svg_text(name if lines else f"{name}: not evaluated", 40, y + 26, "font-weight='bold'")]
    y += 32 + tens * (high - low)

    def place(t, a):
        return f"{40 + WIDTH * t / stages:.1f} {y - tens * (10 * a - low):.1f}"

    if not is_of_tasks:
        corners = (j, low), (j + 1, low), (j + 1, high), (j, high)
        svg.append(svg_path("L".join(place(t, a / 10) for t, a in corners), fill="#eee"))
    for tick in range(low, high + 1):
        svg.append(svg_path(f"{place(0, tick / 10)}h{WIDTH}", "#ddd"))
        svg.append(svg_text(str(10 * tick), 14, y - tens * (tick - low) + 4))
    if not is_of_tasks:
        svg.append(svg_path(f"{place(0, chance)}h{WIDTH}", "#666", more="stroke-dasharray='4'"))
    for colour, line in lines:
        upper = [place(t, mean + sd) for t, mean, sd in line]
        lower = [place(t, mean - sd) for t, mean, sd in line]
        svg.append(svg_path("L".join(upper + lower[::-1]), fill=colour, more="opacity='0.2'"))
        middle = "L".join(place(t, mean) for t, mean, _ in line) + "h0"  # a point is a dot
        thick = 2 if len(line) > 1 else 6
        svg.append(svg_path(middle, colour, more=f"stroke-width='{thick}' stroke-linecap='round'"))
    return svg, y


def curves(runs, variant, name):
    """A variant's lines in a panel, of (time in stages, mean, standard deviation): one, or from
    scratch one per stage. Of a task sequence only the ends of its stages."""
    lines = defaultdict(lambda: defaultdict(list))
    from_scratch = [method for method, m in boml.METHODS.items() if m.from_scratch]
    for r in (r for (v, _), rows in runs.items() if v == variant for r in rows):
        is_of_tasks, at_end = r["stages"] != len(r["datasets"]), r["iteration"] == r["iterations"]
        if r["evaluated"] == name and (at_end or not is_of_tasks):
            line = lines[r["stage"] if r["method"] in from_scratch and not is_of_tasks else 0]
            line[r["stage"] - 1 + r["iteration"] / r["iterations"]].append(r["accuracy"])
    return [[(t, np.mean(a), np.std(a)) for t, a in sorted(line.items())]
            for _, line in sorted(lines.items())]


def report(folder: Path) -> str:
    """Write the folder's report.md, accuracy.svg of its methods and, if lambda varies, lambda.svg of
    the methods for which it does; returns the table."""
    runs = read_records(folder)
    if not runs:
        return f"{folder} holds no evaluation yet"
    first, text = next(iter(runs.values()))[0], table(runs)
    names, claims = first["datasets"], ""  # none on datasets of one's own
    if first["experiment"] == "omniglot":
        claims = TASK_CLAIMS
    elif first["experiment"] != "run" and set(names) <= boml.DATASETS.keys():
        claims = spell_out(CLAIMS, names[:-1])
    judged = f"\n{verdicts(runs, claims)}\n" if claims else ""
    vary = {v.partition("@")[0] for v, _ in runs if "@" in v}
    plain = {key: rows for key, rows in runs.items() if "@" not in key[0]}
    files = {"report.md": text + judged, "accuracy.svg": figure(plain or runs)}
    if vary:
        usual = boml.EXPERIMENTS.get(first["experiment"], boml.Experiment(())).past_weight
        named = {v: f"{v}@{usual.get(v, boml.Config.past_weight):g}" for v in vary}
        files["lambda.svg"] = figure({(named.get(v, v), seed): rows for (v, seed), rows
                                      in runs.items() if v.partition("@")[0] in vary})
    for name, content in files.items():
        with boml.replacing(folder / name) as file:
            file.write(content.encode(errors="backslashreplace"))
    return text


def report_all(argv: list[str]):
    parser = boml.Parser("run.sh report", description="Tables, verdicts and figures of all runs.")
    parser.add_argument("--out", type=Path, default=boml.HERE / "runs", help="folder of results")
    out = parser.parse_args(argv).out
    folders = sorted({path.parents[1] for path in out.glob("**/*/record.jsonl")})
    need(folders, f"{out} holds no records; run an experiment, or name another --out.")
    print("\n".join(map(report, folders)))


# ----------------------------------------------------------------------------------------- Classify


def classify(argv: list[str]):
    """Adapt a run's network to the labelled images, then predict the classes of the others, all in
    one batch: batch norm uses their joint statistics."""
    parser = boml.Parser("run.sh classify", description=classify.__doc__)
    parser.add_argument("--from", dest="source", type=Path, help="folder of the run to use")
    parser.add_argument("--labelled", type=Path, help="folder of class folders")
    parser.add_argument("--images", type=Path, help="folder of images to classify")
    parser.add_argument("--inner-rate", type=float, help="alpha (default: the last dataset's)")
    parser.add_argument("--eval-steps", type=int, help="k (default: the last dataset's)")
    args = parser.parse_args(argv)
    for name, path in (("from", args.source), ("labelled", args.labelled), ("images", args.images)):
        need(path and path.is_dir(), f"classify needs --{name}, a folder; it is {path}.")
    result = Path("predictions.csv")
    need(not result.exists(), f"{result} is here already; move it away.")
    _, state = next(boml.checkpoints(args.source, spare=False), (None, None))
    need(state, f"{args.source} has no checkpoint that can be read.")
    settings, ended = state["settings"], state["iteration"] == 0
    learned = state["learned"][state["stage"] - ended]  # the dataset it was last trained on
    need(settings["method"] in boml.METHODS, f"{args.source} is a run of an unknown method.")
    cfg = boml.Config(**{f.name: settings[f.name] for f in dataclasses.fields(boml.Config)
                         if f.name in settings})
    alpha = learned["inner_rate"] if args.inner_rate is None else args.inner_rate
    k = learned["eval_steps"] if args.eval_steps is None else args.eval_steps
    boml.check("inner_rate", alpha, 0)
    boml.check("eval_steps", k, 1)
    need(cfg.channels in (1, 3), f"{args.source} has {cfg.channels} channels; pictures have 1 or 3.")
    x_s, y_s, classes = read_classes(args.labelled, cfg.channels)
    n, files, x_q = len(classes), [], []
    need(n >= 2, f"{args.labelled} has {n} class folders; put 2 or more there.")
    need(n <= cfg.way, f"{args.labelled} has {n} class folders; the network of {args.source} can "
         f"tell {cfg.way} apart; for more, train with --way {n}.")
    for path in sorted(p for p in args.images.rglob("*") if not p.is_dir()):
        try:
            x_q.append(read_image(path, args.images, cfg.channels))
            files.append(path.relative_to(args.images))
        except Problem as problem:
            print(f"left out: {problem}")
    need(files, f"{args.images} holds no image that can be read.")
    print(f"{n} classes, {len(y_s)} labelled images, {len(files)} others; alpha {alpha:g}, k {k}")
    chances = predict(state, cfg, n, x_s, y_s, x_q, alpha, k)
    need(np.isfinite(chances).all(), "the adaptation diverged; try a smaller --inner-rate.")
    write_predictions(result, classes, files, chances)


def write_predictions(result: Path, classes: list[str], files: list[Path], chances: np.ndarray):
    """A line for each image, printed and in a file; the accuracy, where folders name classes."""
    right, text = [], io.StringIO()
    csv.writer(text).writerow(["file", "class", *classes])
    for name, p in zip(files, chances):
        guess = classes[p.argmax()]
        csv.writer(text).writerow([name, guess, *(f"{v:.4f}" for v in p)])
        print(f"{str(name):40} {guess:24} {max(p):.2f}")
        right += [name.parts[0] == guess] if name.parts[0] in classes else []
    with boml.replacing(result) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))
    print(f"{result} is written")
    if right:
        print(f"right for {np.mean(right):.1%} of {len(right)} images in folders of these classes")


def predict(state, cfg, n, x_s, y_s, x_q, alpha, k):
    """Probabilities (B, n), by the first n outputs of a checkpoint's network."""

    def first(p):
        return {name: v[:n] if name.startswith("linear") else v for name, v in p.items()}

    def floats(images):
        x = torch.from_numpy(np.array(images)).reshape(1, len(images), 28, 28, -1)
        return boml.to_floats(x.permute(0, 1, 4, 2, 3), cfg.channels)

    theta = first(state["theta"])
    posterior = boml.METHODS[state["settings"]["method"]].posterior(cfg, theta)
    posterior.load({name: first(v) if name == "logvar" else v
                    for name, v in state["posterior"].items()})
    start, y_s = boml.leaves(boml.spread(theta, 1)), torch.from_numpy(y_s)[None]
    adapted, _ = boml.adapt(start, floats(x_s), y_s, torch.tensor([alpha]), k)
    with torch.no_grad():
        found = posterior.predict(adapted, floats(x_q), [boml.stream("cpu", "classify")])
    return found[""][0].exp().numpy()  # BomVI: at the posterior mean, as its accuracy


def main(argv: list[str]):
    commands = {"launch": launch, "report": report_all, "classify": classify}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    parser = boml.Parser("data_prep.py", description=__doc__,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="dataset", help=f"any of {', '.join(COUNTS)}")
    parser.add_argument("--raw", type=Path, help="folder that holds the archives; nothing is downloaded")
    parser.add_argument("--data", type=Path, default=boml.HERE / "data", help="folder of <name>.npz")
    args = parser.parse_args(argv)
    for name in args.names:
        need(name in COUNTS, f"{name!r} is not a dataset; choose from {', '.join(COUNTS)}.")
    need(not args.raw or args.raw.is_dir(), f"--raw {args.raw} is not a folder.")
    lacking = [n for n in args.names or UNPACK if not prepare(n, args.raw, args.data)]
    need(not (args.names and lacking), f"{', '.join(lacking)}: missing, for the reason above.")


if __name__ == "__main__":
    boml.heed(signal.default_int_handler)  # raises KeyboardInterrupt
    boml.one_sentence(main, sys.argv[1:])
