"""The record of every data set: its reader, files, shape and normalisation, and where its files can be downloaded."""

from __future__ import annotations

from functools import partial

from fedjax_drift.data import (
    agnews,
    bindingdb,
    dialogue,
    femnist,
    glyphs,
    images,
    movielens,
    shakespeare,
    synthetic,
)
from fedjax_drift.data.downloading import Download, File, as_it_is, extracted, idx_as_npz
from fedjax_drift.data.sources import DataSet

TFDS, AUTHORS, PROJECTS = "tensorflow-datasets", "the authors", "projects that use it"  # who publishes the checksum
MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TORONTO = "https://www.cs.toronto.edu/~kriz/"
TFF = "https://storage.googleapis.com/tff-datasets-public/"
NPZ = "write it with numpy.savez: x_train, y_train, x_test and y_test, uint8 images"


def _idx_files(server: str, name: str, *facts: tuple[int, str]) -> Download:
    """facts: the size and the sha256 checksum of the four files."""
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = [
        File(f"{server}{part}-ubyte.gz", size, f"sha256:{digits}", TFDS)
        for part, (size, digits) in zip(parts, facts, strict=True)
    ]
    return Download(tuple(files), (name,), partial(idx_as_npz, name=name))


# fmt: off
RECORDS = {record.name: record for record in (
    DataSet(
        "synthetic", synthetic.load, 5, model="linear", by_writer=True,
        selector="variant", variants={"feddyn": {}, "fedprox": {"classes": 10}},
    ),
    DataSet("glyphs", glyphs.load, 62, (), (28, 28, 1), model="lenet5", by_writer=True),
    DataSet("dialogue", dialogue.load, 28, model="decoder", by_writer=True),
    DataSet(
        "mnist", images.mnist, 10, ("mnist.npz",), (28, 28, 1), ((0.1307,), (0.3081,)), "mnist_2nn", NPZ, tfds=True,
        downloads=_idx_files(
            MNIST, "mnist.npz",
            (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    DataSet(
        "fashion_mnist", images.fashion_mnist, 10, ("fashion_mnist.npz",), (28, 28, 1), ((0.286,), (0.353,)),
        "mnist_2nn", NPZ, tfds=True,
        downloads=_idx_files(
            FASHION, "fashion_mnist.npz",
            (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    DataSet(
        "emnist", images.emnist, 26, shape=(28, 28, 1), model="emnist_nn",
        how="put the four files emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz of NIST's gzip.zip there",
        selector="split", variants={split: images.emnist_split(split) for split in images.EMNIST},
        downloads=Download((
            File("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", 561_753_746,
                 "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e", TFDS),
        ), tuple(images.idx_file(split, part) for split in images.EMNIST for part in images.IDX_PARTS),
            partial(extracted, inside="gzip")),
    ),
    DataSet(
        "cifar10", images.cifar10, 10,
        ("cifar10.npz", images.CIFAR10, "cifar10_png.npz", "cifar10_webp.npz", "cifar10_jpeg.npz"),
        (32, 32, 3), ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)), "cifar_cnn", tfds=True,
        parts={images.CIFAR10: tuple(f"{images.CIFAR10}/{batch}" for batch in (*images.BATCHES, "test_batch"))},
        downloads=Download((
            File(f"{TORONTO}cifar-10-python.tar.gz", 170_498_071, "md5:c58f30108f718f92721af3b95e74349a", AUTHORS),
        ), (images.CIFAR10,), extracted),
    ),
    DataSet(
        "cifar100", images.cifar100, 100, ("cifar100.npz", "cifar-100-python"),
        (32, 32, 3), ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)), "cifar_cnn", tfds=True,
        parts={"cifar-100-python": ("cifar-100-python/train", "cifar-100-python/test")},
        downloads=Download((
            File(f"{TORONTO}cifar-100-python.tar.gz", 169_001_437, "md5:eb9058c3a382ffc7106e4002c42a8d85", AUTHORS),
        ), ("cifar-100-python",), extracted),
    ),
    DataSet(
        "cinic10", images.cinic10, 10, ("CINIC-10",),
        (32, 32, 3), ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)), "cifar_cnn",
        "unpack CINIC-10.tar.gz of Edinburgh DataShare into a new folder CINIC-10 there",
        parts={"CINIC-10": ("CINIC-10/train", "CINIC-10/test")},
        downloads=Download((
            File("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz", 687_544_992,
                 "md5:6ee4d0c996905fe93221de577967a372", PROJECTS),
        ), ("CINIC-10",), partial(extracted, into="CINIC-10")),
    ),
    DataSet(
        "tiny_imagenet", images.tiny_imagenet, 200, ("tiny-imagenet-200",),
        (64, 64, 3), ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)), "resnet18",
        parts={"tiny-imagenet-200": tuple(f"tiny-imagenet-200/{part}" for part in images.TINY_IMAGENET)},
        downloads=Download((
            File("http://cs231n.stanford.edu/tiny-imagenet-200.zip", 248_100_043,
                 "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821", PROJECTS),
        ), ("tiny-imagenet-200",), extracted),
    ),
    DataSet(
        "femnist", femnist.load, 62, (), (28, 28, 1), femnist.NORMALISATION, "lenet5",
        "run LEAF's data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and copy its folders data/train and "
        "data/test into leaf_femnist; or copy the files of fedjax.datasets.emnist, or those of "
        "tff.simulation.datasets.emnist.load_data in ~/.tff; or write femnist_writers.npz with numpy.savez: x uint8 "
        "[M, 28, 28], 255 = background, y and writer [M]. Or use glyphs, which needs no file",
        standardize=False, by_writer=True, parts={"leaf_femnist": ("leaf_femnist/train",)},
        selector="source",
        variants={"auto": {"files": sum(femnist.FILES.values(), ())}}
        | {source: {"files": names} for source, names in femnist.FILES.items()},
        downloads=Download((
            File(f"{TFF}emnist_all.sqlite.lzma", 170_507_172,
                 "sha256:c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48", "one project that uses it"),
        ), ("emnist_all.sqlite.lzma",), as_it_is),
    ),
    DataSet(
        "movielens", movielens.load, 2, model="din", by_writer=True, parts={"ratings.dat": ("users.dat",)},
        how="unpack ml-1m.zip of GroupLens there; with size='latest-small', movielens_latest_small.npz is read: write "
        "it from ratings.csv of ml-latest-small with numpy.savez, arrays user_id, movie_id and timestamp [R]",
        selector="size", variants={size: {"files": (name,)} for size, name in movielens.FILENAMES.items()},
        downloads=Download((
            File("https://files.grouplens.org/datasets/movielens/ml-1m.zip", 5_917_549,
                 "sha256:a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20", TFDS),
        ), ("ml-1m/ratings.dat", "ml-1m/users.dat"), extracted),
    ),
    DataSet(
        "shakespeare", shakespeare.load, shakespeare.CLASSES, shakespeare.FILES, model="decoder", by_writer=True,
        how="copy shakespeare.sqlite of tff.simulation.datasets.shakespeare.load_data from ~/.tff",
        downloads=Download((
            File(f"{TFF}shakespeare.sqlite.lzma", 1_329_828,
                 "sha256:d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4", "FedJAX"),
        ), ("shakespeare.sqlite.lzma",), as_it_is),
    ),
    DataSet(
        "agnews", agnews.load, 4, (agnews.FILENAME,), model="text_classifier",
        how="download AG's News (ag_news_csv.tar.gz, Zhang, Zhao and LeCun's version) and unpack it there",
        parts={"train.csv": ("test.csv",)},
    ),
    DataSet(
        "bindingdb", bindingdb.load, 2, (bindingdb.FILENAME,), model="drug_target",
        how="download all of BindingDB as tab-separated values from its site, and unpack it as BindingDB_All.tsv there",
    ),
)}
# fmt: on
