"""Tests that plots show the numbers of the histories that they are given."""

import json
from pathlib import Path

import matplotlib
import matplotlib.colors
import numpy as np
import pytest
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from small import thorough

import fedjax_drift as fd
from fedjax_drift import logs, plots
from fedjax_drift.plots import Style


def history(rounds=6, seed=0, epochs=3, every=2, labels=4):
    """Returns the history of a run that is measured every ``every`` rounds, as read from JSON.

    ``lp_absent`` is None in round 4.
    """
    rng = np.random.default_rng(seed)
    records = []
    for t in range(1, rounds + 1):
        record = {"round": t, "train_loss": 1 / t, "clients": 10, "gain": 0.3 + 0.01 * (t % 3)}
        record |= {"period_variance": 1e-6 * t, "client_variance": 3e-6 * t}
        if t % every == 0:
            names = ("client_drift", "update_norm", "update_cosine", "cka", "kl")
            record |= {name: rng.uniform(0.1, 1, epochs).tolist() for name in names}
            record |= {name: rng.uniform(0.1, 1) for name in ("period_drift", "dissimilarity", "lp_present")}
            record |= {"lp_absent": None if t == 4 else 0.5, "label_mix": rng.dirichlet(np.ones(labels)).tolist()}
        records.append(record)
    return json.loads(json.dumps(records))


def points(line):
    return line.get_xydata().tolist()


def texts(of):
    """Returns texts, or those of the figure's legend, each in one line."""
    if hasattr(of, "legends"):
        of = [text for legend in of.legends for text in legend.get_texts()]
    return [text.get_text().replace("\n", " ") for text in of]


def edges(axes, x):
    """Returns the lower and the upper edge of the band of the first run at x."""
    outline = axes.collections[0].get_paths()[0].vertices
    y = outline[np.isclose(outline[:, 0], x), 1]
    return y.min(), y.max()


INTERVAL = "mean over seeds; band: 95 % interval of the mean)"


BY_ROUND = {
    plots.drift: {"period_drift": "log", "client_drift": "log", "dissimilarity": "log"},
    plots.updates: {"update_norm": "linear", "update_cosine": "linear"},
    plots.forgetting: {"lp_present": "linear", "lp_absent": "linear"},
    plots.gain: {"gain": "linear", "period_variance": "log", "client_variance": "log"},
}


@pytest.mark.parametrize("picture", BY_ROUND, ids=lambda picture: picture.__name__)
def test_lines_show_the_measured_rounds(picture, tmp_path):
    records = {"a": history(), "b": history(seed=1, rounds=4), "bare": [{"round": 1, "train_loss": 1.0}]}
    figure = picture(records, path=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert len(figure.axes) == len(BY_ROUND[picture])
    for axes, (key, scale) in zip(figure.axes, BY_ROUND[picture].items(), strict=True):
        for line, name in zip(axes.lines, "ab", strict=False):
            known = [(record["round"], record[key]) for record in records[name] if record.get(key) is not None]
            assert points(line) == [[t, np.ravel(value)[-1]] for t, value in known]
        assert axes.get_yscale() == scale and axes.get_xlabel() == "Round" and axes.get_ylabel() and axes.get_title()
    names = texts(figure)
    assert len(names) == 2 and names[0][0] == "a" and names[1][0] == "b"  # the run without a line has no entry
    guides = [points(axes.lines[-1]) for axes in figure.axes] if picture is plots.forgetting else []
    assert all(guide == [[0, 1], [1, 1]] for guide in guides)
    assert picture is not plots.gain or names == ["a, median gain 0.31", "b, median gain 0.31"]


def test_agreement_is_plotted_over_local_epochs_if_there_are_several():
    seeds = [history(rounds=8), history(rounds=8, seed=1)]
    cka, kl = plots.agreement({"a": seeds, "b": seeds[0]}).axes
    values = np.array([[record["kl"] for record in seed if "kl" in record] for seed in seeds])  # [2, 4 rounds, 3]
    medians = np.median(values, axis=1)
    np.testing.assert_allclose(kl.lines[0].get_xydata(), np.stack([[1, 2, 3], medians.mean(0)], axis=1))
    np.testing.assert_allclose(kl.lines[1].get_ydata(), medians[0])
    assert len(kl.collections) == 1 and edges(kl, 1)[0] >= 0  # a run with one seed has no band; KL is not negative
    assert cka.get_xlabel().replace("\n", " ") == f"Local epoch (median over rounds; {INTERVAL}" and kl.get_ylabel()

    records = {"a": history(epochs=1)}
    cka, _ = plots.agreement(records).axes
    assert points(cka.lines[0]) == [[record["round"], *record["cka"]] for record in records["a"] if "cka" in record]
    assert cka.get_xlabel() == "Round"


@pytest.mark.parametrize("rounds", (*map(thorough, (51, 75, 99)), 100, 101, *map(thorough, (149, 500))))
@pytest.mark.parametrize("seeds", (1, 3))
def test_noise_is_smoothed_equally_at_all_rounds(rounds, seeds):
    """The variance of a mean is the sum of the squared weights, which the points of this test show one by one."""
    lengths = set()
    for t in {1, 2, rounds // 3, rounds // 2, rounds - 2, rounds}:
        run = [{"round": r, "train_loss": float(r == t)} for r in range(1, rounds + 1)]
        (axes,) = plots.curves({"a": [run] * seeds}, style=Style(band=None)).axes
        lengths |= {round(1 / y) for y in axes.lines[0].get_ydata() if y}
    assert lengths == {1 if rounds <= 100 else -(-rounds // 50)}


def test_the_style_selects_window_band_and_size(tmp_path):
    values = np.random.default_rng(0).normal(5, 1, (3, 250))
    seeds = [[{"round": t, "train_loss": y} for t, y in enumerate(of, 1)] for of in values]

    def drawn(records, **options):
        figure = plots.curves(records, style=Style(**options))
        return figure, figure.axes[0], figure.axes[0].lines[0].get_ydata()

    for off in (None, 1):
        _, axes, y = drawn({"a": seeds[0]}, smooth=off)
        np.testing.assert_array_equal(y, values[0])
        assert axes.get_xlabel() == "Round" and not axes.collections
    _, axes, y = drawn({"a": seeds[0]})  # one seed has no band, also if it is smoothed
    assert len(y) == 50 and axes.get_xlabel() == "Round\n(means of 5 measured rounds)" and not axes.collections
    windows = values[:, :240].reshape(3, 6, 40).mean(2)
    half = 4.302652730 * windows.std(0, ddof=1) / 3**0.5
    expected = {
        "interval": (windows.mean(0) - half, windows.mean(0) + half, "95 % interval of the mean"),
        "deviation": (*(windows.mean(0) + sign * windows.std(0, ddof=1) for sign in (-1, 1)), "standard deviation"),
        "range": (windows.min(0), windows.max(0), "smallest to largest seed"),
    }
    for band, (low, high, words) in expected.items():
        _, axes, y = drawn({"a": seeds}, smooth=40, band=band)
        np.testing.assert_allclose(y[:6], windows.mean(0))
        np.testing.assert_allclose(edges(axes, 20.5), (low[0], high[0]))
        assert words in axes.get_xlabel().replace("\n", " ") and "means of 40 measured rounds" in axes.get_xlabel()
        np.testing.assert_allclose(y[6], values[:, -40:].mean())  # the last window overlaps the one before
    _, axes, _ = drawn({"a": seeds}, band=None)
    assert not axes.collections and "band" not in axes.get_xlabel()
    assert drawn({"a": seeds}, figsize=(5, 3))[0].get_size_inches().tolist() == [5, 3]


def test_a_run_that_diverges_is_named_and_does_not_flatten_the_others():
    good = [{"round": t, "train_loss": 2 / t, "accuracy": 0.5} for t in range(1, 21)]
    bad = [r | {"train_loss": float("nan") if r["round"] >= 12 else r["train_loss"]} for r in good]
    never = [r | {"train_loss": None} for r in good]
    empty = [r | ({"train_loss": None, "clients": 0} if r["round"] == 20 else {}) for r in good]
    records = {"good": good, "bad": bad, "never": never, "seeds": [good, bad], "no client in the end": empty}
    assert texts(plots.curves(records)) == [
        "good", "bad (diverged in round 12)", "never (diverged in round 1)",
        "seeds (1 of 2 seeds diverged, the first in round 12)", "no client in the end",
    ]  # fmt: skip
    assert texts(plots.curves(bad)) == ["diverged in round 12"]  # a run without a name
    (axes,) = plots.rounds_to_target({"bad": bad}, 0.9).axes
    assert texts(axes.get_yticklabels()) == ["bad (diverged in round 12)"]

    huge = [r | {"train_loss": r["train_loss"] * (1e9 if r["round"] > 12 else 1)} for r in good]
    _, loss = plots.curves({"good": good, "huge": huge, "also": good}).axes
    assert loss.get_ylim()[1] < 10 and "up to 1.54e+08" in loss.get_title().replace("\n", " ")
    (mark,) = loss.lines[3:]
    (leaves,) = points(mark)  # where the line from round 12 to round 13 crosses the edge
    assert leaves == [pytest.approx(12, abs=0.01), 1] and mark.get_color() == loss.lines[1].get_color()
    _, loss = plots.curves({"good": good, "ten times": [r | {"train_loss": 10 * r["train_loss"]} for r in good]}).axes
    assert loss.get_ylim()[1] > 20 and len(loss.lines) == 2  # the first values of a run that learns fast are not huge


def test_forgetting_shows_no_impossible_ratios():
    seeds = [[{"round": t, "lp_present": y} for t, y in enumerate(of, 1)] for of in ((90, 1.1, 0.9), (0.5, 1.0, 1.2))]
    (axes,) = plots.forgetting({"a": seeds, "b": seeds[0]}).axes
    assert 0 <= axes.get_ylim()[0] < axes.get_ylim()[1] <= 3


@pytest.mark.parametrize("magic", (thorough(""), "%matplotlib inline"))
def test_a_notebook_shows_a_figure_once_with_and_without_magic(magic):
    import nbformat
    from nbclient import NotebookClient

    source = "import fedjax_drift as fd\nfd.plots.curves([{'round': 1, 'train_loss': 1.0}])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{magic}\n{source}")])
    (cell,) = NotebookClient(notebook, timeout=120, kernel_name="python3").execute().cells
    (output,) = [output for output in cell.outputs if "data" in output]
    assert output.output_type == "execute_result" and len(output.data["image/png"]) > 5_000


@pytest.mark.thorough
def test_large_fonts_and_dark_backgrounds():
    """No text covers another one, and nothing has the colour of the background."""
    records = {f"a setting with quite a long name, number {i}": [history(), history(seed=i)] for i in range(8)}
    with matplotlib.rc_context({"font.size": 20}):
        for picture in (plots.drift, plots.updates, plots.agreement, plots.forgetting):
            figure = picture(records)
            figure.draw_without_rendering()
            boxes = [
                text.get_window_extent()
                for axes in figure.axes
                for text in (axes.title, axes.xaxis.label, axes.yaxis.label)
            ]
            boxes += [legend.get_window_extent() for legend in figure.legends]
            assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)], picture
            assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes), picture
    run = [{"round": 1, "accuracy": 0.1, "train_loss": 1.0}]
    with style.context("dark_background"):
        (axes,) = plots.rounds_to_target({str(i): run for i in range(7)}, 0.5).axes
        lines = plots.curves({str(i): run for i in range(7)}).axes[0].lines
    shades = [bar.get_edgecolor() for bar in axes.patches] + [line.get_color() for line in lines]
    assert all(max(matplotlib.colors.to_rgb(shade)) > 0.5 for shade in shades)
    assert all(bar.get_facecolor()[3] == 0 and bar.get_hatch() for bar in axes.patches)


def test_curves_show_chosen_entries_with_their_labels():
    run = [
        {"round": t, "accuracy": 0.1 * t, "perplexity": 9.0 - t, "uplink_bytes": 1e6, "downlink_bytes": 1e6}
        for t in (1, 2)
    ]
    first, second = plots.curves(
        {"A": run}, y={"perplexity": "Perplexity", "accuracy": "Exact match"}, x="megabytes"
    ).axes
    assert first.get_ylabel() == "Perplexity" and points(first.lines[0]) == [[2, 8], [4, 7]]
    assert second.get_ylabel() == "Exact match" and points(second.lines[0]) == [[2, 0.1], [4, 0.2]]


def test_one_long_name_does_not_make_a_tall_legend():
    records = {f"run {i}": history(rounds=2) for i in range(11)} | {"a long name of a setting " * 5: history(rounds=2)}
    figure = plots.curves(records)
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().height < 1.3 * figure.dpi  # inches


def test_zeros_are_shown_on_a_logarithmic_axis():
    sampled, everyone = history(), [record | {"period_drift": 0.0} for record in history(every=1)]
    figure = plots.drift({"sampled": sampled, "everyone": everyone})
    period = figure.axes[0]
    assert period.get_yscale() == "symlog" and period.get_ylim()[0] < 0 < period.get_ylim()[1]
    assert (period.lines[1].get_ydata() == 0).all() and len(period.lines[1].get_ydata()) == 6


def test_several_seeds_are_shown_as_a_mean_with_its_confidence_interval(tmp_path):
    seeds = [[{"round": t, "train_loss": t + s} for t in range(1, 4 + s)] for s in (0, 1, 2)]  # all have rounds 1 to 3
    half = 4.302652730 * 1 / 3**0.5  # Student's t with 2 degrees of freedom; standard deviation 1
    (loss,) = plots.curves({"a": seeds, "alone": seeds[0]}).axes
    assert points(loss.lines[0]) == [[1, 2], [2, 3], [3, 4]] and points(loss.lines[1]) == [[1, 1], [2, 2], [3, 3]]
    np.testing.assert_allclose(edges(loss, 2), [3 - half, 3 + half], atol=1e-5)
    assert loss.get_xlabel().replace("\n", " ") == f"Round ({INTERVAL}"

    with logs.Log(tmp_path) as log:  # a log, and the runs of a sweep, give the same plot
        for seed, history in enumerate(seeds):
            for record in history:
                log({"algorithm": "a", "seed": seed, **record})
    runs = [fd.Run(seed, {"lr": 0.1}, None, history) for seed, history in enumerate(seeds)]
    for records, name in ((tmp_path, "a"), ({"b": tmp_path}, "b"), (runs, "lr 0.1")):
        figure = plots.curves(records)
        assert points(figure.axes[0].lines[0]) == points(loss.lines[0])
        assert texts(figure) == [name]
    assert not plots.curves(seeds[0]).legends  # a single history has no name

    # On a logarithmic axis, the mean and the interval are those of the logarithms.
    drifts = [[{"round": 1, "period_drift": 10.0**s}] for s in (0, 1, 2)]
    (period,) = plots.drift({"a": drifts}).axes
    np.testing.assert_allclose(points(period.lines[0]), [[1, 10]])
    np.testing.assert_allclose(np.log10(edges(period, 1)), [1 - half, 1 + half], atol=1e-6)


def test_the_plot_of_rounds_to_target_marks_bounds():
    def run(*accuracies):
        return [{"round": 10 * t, "accuracy": a} for t, a in enumerate(accuracies, 1)] + [{"round": 99}]

    records = {"there": run(0.1, 0.9), "seeds": [run(0.95), run(0.2, 0.3, 0.9)], "never": run(0.1, 0.2), "bare": run()}
    reached = {"there": [(20, 10)], "seeds": [(10, 0), (30, 20)], "never": [(None, 20)]}
    assert fd.rounds_to_target(records, 0.9) == reached
    (axes,) = plots.rounds_to_target(records, 0.9).axes
    assert [bar.get_width() for bar in axes.patches] == [20, 20, 20]
    assert [bar.get_hatch() for bar in axes.patches] == [None, None, "///"]
    assert texts(axes.texts) == ["20", "mean 20", "> 20"] and "90 %" in axes.get_title()
    assert texts(axes.get_yticklabels()) == ["there", "seeds", "never"]
    # A thin line starts at the evaluation before the first one that reaches the target. The last entry has the dots
    # of the seeds.
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 20], [0, 10], [20, 30], [10, 30]]
    assert "line: since the evaluation before" in axes.get_xlabel()
    (axes,) = plots.rounds_to_target({"a": [run(0.9), run(0.1)]}, 0.5).axes
    assert texts(axes.texts) == ["mean > 10 (1 of 2 seeds)"]
    loss = [{"round": t, "train_loss": 1 / t} for t in range(1, 6)]
    (axes,) = plots.rounds_to_target(loss, 0.25, key="train_loss").axes
    assert axes.patches[0].get_width() == 4 and not axes.lines and axes.get_xlabel() == "Round"
    assert fd.rounds_to_target(loss, 0.25, key="train_loss") == {"": [(4, 3)]}


def swept(algorithm, seeds=(0, 1), settings=({},), value=0.5):
    return [
        fd.Run(seed, setting, None, [{"round": t, "accuracy": value + 0.1 * seed} for t in (1, 2)], algorithm)
        for setting in settings
        for seed in seeds
    ]


def test_runs_of_several_algorithms_and_settings_have_distinct_names(tmp_path):
    def names(records):
        return texts(plots.curves(records))

    both = swept("fedavg") + swept("feddc", value=0.7)
    assert names(both) == ["fedavg", "feddc"] and names(both[:2]) == []
    assert plots.curves(both).axes[0].lines[1].get_ydata().tolist() == pytest.approx([75, 75])
    settings = [{"lr": 0.1}, {"lr": 0.2}]
    assert names(swept("fedavg", settings=settings)) == ["lr 0.1", "lr 0.2"]
    assert names(swept("fedavg", settings=settings) + swept("feddc")) == ["fedavg, lr 0.1", "fedavg, lr 0.2", "feddc"]
    # A value of a dict may be the runs of a sweep, a single run, or a list with the log of each seed.
    assert names({"A": swept("fedavg"), "B": swept("feddc")[0]}) == ["A", "B"]
    assert names({"A": swept("fedavg", settings=settings)}) == ["A, lr 0.1", "A, lr 0.2"]
    for seed in range(2):
        with logs.Log(tmp_path / f"seed{seed}") as log:
            for record in both[seed].history:
                log(record)
    folders = [tmp_path / f"seed{seed}" for seed in range(2)]
    (line,) = plots.curves({"A": [logs.read(folder) for folder in folders]}).axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([55, 55])
    lines = [{"algorithm": a, "seed": int(s), "round": 1, "accuracy": 0.1} for a, s in ("x1", "x2", "y0")]
    assert names(lines) == ["x", "y"] and names({"A": lines, "B": lines[:2]}) == ["A, x", "A, y", "B"]


def test_bands_stay_in_the_range_of_the_quantity():
    """With few seeds that differ much, an interval of Student's t would include impossible values."""

    def seed(lp, accuracy, loss):
        return [{"round": t, "lp_absent": lp, "accuracy": accuracy, "train_loss": loss} for t in (1, 2)]

    records = {"a": [seed(0.1, 0.05, -1.0), seed(30.0, 0.99, 4.0)]}
    bands = [axes.collections[0].get_paths()[0].vertices[:, 1] for axes in plots.forgetting(records).axes]
    assert bands[0].min() == 0 and bands[0].max() > 30
    accuracy, loss = (axes.collections[0].get_paths()[0].vertices[:, 1] for axes in plots.curves(records).axes)
    assert (accuracy.min(), accuracy.max()) == (0, 100)
    assert loss.min() < -1  # one loss is negative, so the band has no lower limit


def test_fairness_shows_quantiles_and_the_worst_tenth():
    accuracy = np.array([0.2, np.nan, 1.0, 0.4, 0.6])
    figure = plots.fairness({"FedAvg": {"accuracy": accuracy, "personal_accuracy": accuracy + 0.1}})
    before, after = (axes.lines[0] for axes in figure.axes)
    np.testing.assert_allclose(before.get_xydata(), [[0, 20], [25, 20], [50, 40], [75, 60], [100, 100]])
    np.testing.assert_allclose(after.get_ydata()[1:], [30, 50, 70, 110])
    assert texts(figure) == ["FedAvg: 20 %, own models 30 %"]
    both = {str(i): {"accuracy": accuracy, "personal_accuracy": accuracy} for i in range(24)}
    looks = [(line.get_color(), line.get_linestyle()) for line in plots.fairness(both).axes[0].lines]
    assert len(set(looks)) == 24
    some = plots.fairness({"a": {"accuracy": accuracy}, "b": {"accuracy": accuracy * np.nan}})
    assert texts(some)[1] == "b (no finite score)"
    assert texts(plots.fairness({"accuracy": accuracy})) == ["all clients: 20 %"]
    figure = plots.fairness({"loss": np.array([0.5, 2.0, np.nan]), "personal_loss": np.array([0.1, 0.2, np.nan])})
    assert texts(figure) == ["all clients: 2, own models 0.2"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [2.0, 2.0, 0.5] and "Loss" in figure.axes[0].get_ylabel()


def test_plots_of_a_model_that_is_not_a_classifier():
    run = [{"round": t, "train_loss": 2.0 / t, "loss": 3.0 / t} for t in (1, 2)]
    test, train = plots.curves(run).axes
    assert points(test.lines[0]) == [[1, 3], [2, 1.5]] and "Test loss" in test.get_title()
    rows = [(np.zeros((n, 2), np.float32), np.zeros(n, np.float32)) for n in (3, 5)]
    (sizes,) = plots.federation(fd.FederatedData.from_clients(rows)).axes
    assert sizes.get_title() == "Sizes (8 examples in all)"


def test_a_federation_shows_fifty_of_many_clients():
    clients = [(np.zeros((i + 1, 2), np.float32), np.full(i + 1, i % 3)) for i in range(120)]
    mix, sizes = plots.federation(fd.FederatedData.from_clients(clients)).axes[:2]
    share = mix.images[0].get_array()
    assert share.shape == (50, 3) and (share.sum(axis=1) == 100).all()
    assert sum(bar.get_height() for bar in sizes.patches) == 120


@pytest.mark.thorough
def test_participation_shows_every_round_of_every_client():
    figure = plots.participation([{"cohort": np.array([0, 2, -1])}, [2], []], num_clients=4)
    when, often = figure.axes
    assert when.images[0].get_array().tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert [bar.get_width() for bar in often.patches] == [1, 0, 2, 0]
    assert often.get_title() == "Mean 0.75, 2 never"
    many = plots.participation([np.arange(0, 5000, 2)] * 3, 5000).axes[0].images[0].get_array()
    assert many.shape == (385, 3) and many.sum() == 3 * 2500


def test_plots_accept_records_in_all_forms(tmp_path):
    run = history(rounds=2)
    for name in ("a", "b"):
        with logs.Log(tmp_path / name, before=run):
            pass
    for records in (tmp_path, {"a": tmp_path / "a", "b": run}, {"a": f"{tmp_path}/a", "b": [run]}):
        assert texts(plots.curves(records)) == ["a", "b"]


def test_drift_story_has_four_panels(tmp_path):
    rng = np.random.default_rng(0)
    data = fd.FederatedData.from_clients([(rng.random((4, 2)), np.full(4, label)) for label in (0, 1, 1)])
    records = {"a": history(rounds=40, every=3), "b": history(rounds=40, every=3, seed=1)}
    for name, gained in (("a", 0.01), ("b", 0.02)):
        for record in records[name]:
            record["accuracy"] = gained * record["round"]
    figure = plots.drift_story(records, 0.5, data, tmp_path / "story.png")
    mix, drift, accuracy, rounds, _ = figure.axes  # the last axes are the colour bar
    np.testing.assert_array_equal(mix.images[0].get_array(), [[100, 0], [0, 100], [0, 100]])
    assert drift.get_yscale() == "log" and points(drift.lines[0])[0] == [3, records["a"][2]["client_drift"][-1]]
    assert points(accuracy.lines[1])[24] == [25, 50] and points(accuracy.lines[2]) == [[0, 50], [1, 50]]
    assert len({line.get_marker() for line in accuracy.lines[:2]}) == 2  # the lines also differ without colours
    assert texts(rounds.texts) == ["> 40", "25"]
    assert (tmp_path / "story.png").stat().st_size > 10_000
    long = {f"a name with many settings, of which the last one differs, {i}": records["a"] for i in range(3)}
    assert texts(plots.drift_story(long, 0.5, data).axes[3].get_yticklabels()) == [*long]


def test_label_mix_shows_shares_as_bubbles():
    run = history(rounds=9, every=1)
    run[0]["label_mix"] = [0.5, 0.0, 0.5, 0.0]
    (axes,) = plots.label_mix(run).axes
    bubbles = axes.collections[0]
    assert bubbles.get_offsets()[:2].tolist() == [[1, 0], [1, 2]] and len(bubbles.get_offsets()) == 2 + 8 * 4
    share = np.ravel([record["label_mix"] for record in run])
    area = bubbles.get_sizes()
    np.testing.assert_allclose(area / area[0], share[share > 0] / 0.5)
    assert axes.get_xlabel() == "Round" and axes.get_ylabel() == "Label"

    axes = plots.label_mix(history(rounds=9, every=1, labels=200)).axes[0]
    axes.figure.draw_without_rendering()
    top = (
        axes.transData.transform((0, 199))[1] + axes.collections[0].get_sizes().max() ** 0.5 / 2 * axes.figure.dpi / 72
    )
    assert top <= axes.get_window_extent().y1  # the bubbles of the last label are not cut

    (axes,) = plots.label_mix(history(rounds=500, every=1)).axes
    assert sorted(set(axes.collections[0].get_offsets()[:, 0])) == list(range(1, 501, 17))
    assert "one in 17" in axes.get_title()


def test_quadratics_have_a_panel_per_setting():
    errors = {"x": [[1.0, 0.1, 0.01], [1.0, 0.5]], "y": [np.array([2.0, float("inf")]), []]}
    every, some = plots.quadratics(errors, ["all clients", "20 % a round"]).axes
    assert points(every.lines[0]) == [[1, 1], [2, 0.1], [3, 0.01]] and points(every.lines[1]) == [[1, 2]]
    assert [points(line) for line in some.lines] == [[[1, 1], [2, 0.5]]]
    assert every.get_title() == "all clients" and every.get_yscale() == "log" and every.get_ylim() == some.get_ylim()


def test_fifteen_runs_have_distinct_styles_that_are_the_same_in_all_plots():
    records = {f"run {i}": history(rounds=2) for i in range(15)}
    looks = [(line.get_color(), line.get_linestyle()) for line in plots.curves(records).axes[0].lines]
    assert len(set(looks)) == 15
    assert [(line.get_color(), line.get_linestyle()) for line in plots.updates(records).axes[1].lines] == looks
    figure = plots.drift(records)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 > 0 and legend.x1 < figure.bbox.x1
    assert all(legend.y1 < axes.get_tightbbox().y0 for axes in figure.axes)


RUN, BARE = history(), [{"round": 1, "train_loss": 1.0, "accuracy": 0.5}]
CLIENTS, UNLABELLED = (fd.FederatedData.from_clients([(np.ones((2, 1)), y)]) for y in (np.arange(2), np.ones(2)))
STATE = fd.ServerState(0, 0, (), ())
WRONG = [
    (plots.curves, {"records": RUN, "style": 3}, "style must be of type Style, got 3: pass fd.plots.Style"),
    (plots.curves, {"records": {"a": []}}, "at least 1 round"),
    (plots.curves, {"records": {"a": [{"round": 1, "train_loss": np.inf}]}},
     "round with finite values, got none: a diverged in round 1; lower the learn"),
    (plots.curves, {"records": RUN, "y": {}}, "y must have at least one entry"),
    (plots.curves, {"records": RUN, "y": "loss"}, "y must be of type Mapping"),
    (plots.curves, {"records": RUN, "y": {"loss": 3}}, "str"),
    (plots.curves, {"records": RUN, "y": {"bleu": "BLEU"}}, "at least 1 round that was measured"),
    (plots.curves, {"records": swept("fedavg") + swept("fedavg")},
     "two of fedavg with seed 0: pass a dict from a name to the result of each sweep"),
    (plots.curves, {"records": {"A": 3}}, r"records\['A'\] must be a history, .*, got an int"),
    (plots.curves, {"records": [swept("fedavg")[0], {"round": 1}]}, "records must be a history, .* got a list of Run"),
    (plots.curves, {"records": {"A": [Path("a")]}},
     r"records\['A'\] must be .* got a list of PosixPath: .* {name: fd.logs.read.path.}"),
    (plots.curves, {"records": ["a"]}, "records must be .* got a list of str"),
    (plots.curves, {"records": (STATE, RUN)}, "records must be a history.*got a tuple of "),
    (plots.curves, {"records": 3}, "records must be a history.*got an int"),
    *((function, {"records": records, "target": target}, said)
      for function in (plots.rounds_to_target, fd.rounds_to_target)
      for records, target, said in (
          (RUN, 0.5, "at least 1 round with 'accuracy', got none"),
          (BARE, "high", "target must be a finite number, got 'high'"),
          (BARE, None, "target must be .*, got None"),
          (BARE, 95, "target must be an accuracy in 0..1, got 95: pass 0.95 for 95 %"))),
    (plots.fairness, {"scores": {"FedAvg": {"loss": np.array([np.nan])}}}, "scores of at least 1 client"),
    (plots.fairness, {"scores": [np.ones(2)]}, "scores must be the result of Simulation.evaluate_clients"),
    *((plots.participation, {"cohorts": wrong, "num_clients": 4}, said)
      for wrong, said in (([], "at least 1 round"), ([[4]], "client ids in 0..3"), ([[0.5]], "client ids in 0..3"))),
    *((picture, {"records": {"a": BARE}}, rf"at least 1 round .*pass measure=\('{name}',\) to Simulation")
      for picture, name in ((plots.drift, "gradients"), (plots.updates, "updates"), (plots.agreement, "predictions"),
                            (plots.forgetting, "forgetting"), (plots.sharpness, "sharpness"))),
    (plots.gain, {"records": {"a": BARE}}, "a run of fedeve"),
    (plots.drift_story, {"records": BARE, "target": 0.5, "data": CLIENTS},
     r"at least 1 round that was measured, got none: pass measure=\('gradients'"),
    (plots.drift_story, {"records": [RUN[1] | {"accuracy": 0.5}], "target": 0.5, "data": UNLABELLED},
     "label counts need integer labels"),
    (plots.label_mix, {"history": BARE}, r"at least 1 round .*pass measure=\('labels',\)"),
    (plots.label_mix, {"history": RUN, "largest": 0.1}, "largest must be at least the largest share of this history, "),
    (plots.quadratics, {"errors": {}, "titles": []}, "quadratics needs at least 1 round"),
    (plots.quadratics, {"errors": {"x": [[1.0], [2.0]]}, "titles": ["all"]},
     r"errors\['x'\] must have one list per title \(1\), got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "said"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_call_says_what_is_wrong(function, arguments, said):
    with pytest.raises(ValueError, match=said):
        function(**arguments)


def test_runs_of_one_round_are_told_apart():
    """24 runs have different colours or markers, stand side by side, and the interval over seeds is a bar."""
    runs = {f"run {i}": [history(rounds=1, seed=i), history(rounds=1, seed=i + 50)] for i in range(24)}
    for seeds in runs.values():
        seeds[1][0]["train_loss"] = 0.5
    (loss,) = plots.curves(runs).axes
    loss.figure.draw_without_rendering()
    assert len({(line.get_color(), line.get_marker()) for line in loss.lines}) == 24
    assert len({float(line.get_transform().transform((1, 1))[0]) for line in loss.lines}) == 24
    low, high = edges(loss, 1)
    assert low == 0 and high > 3  # the band is clipped at 0


def test_a_line_that_leaves_the_axis_leaves_room_for_the_others():
    """Triangles of runs that leave in the same round do not cover each other."""
    good = [{"round": t, "train_loss": 2 / t} for t in range(1, 41)]
    bad = [r | {"train_loss": r["train_loss"] * 100.0 ** max(0, r["round"] - 20)} for r in good]
    for picture in (plots.curves, plots.drift):
        rename = [[r | {"period_drift": r["train_loss"]} for r in run] for run in (good, bad, bad, good, good)]
        (axes, *_) = picture(dict(zip("abcde", rename, strict=True))).axes
        assert axes.get_ylim()[1] < 2.5
        axes.figure.draw_without_rendering()
        tips = [line.get_transform().transform(line.get_xydata())[0] for line in axes.lines[5:]]
        assert len(tips) == 2 and abs(tips[0] - tips[1]).max() > 5  # pixels


def test_all_methods_of_a_table_can_be_read():
    """Bands stay in the limits, an explosion is outside, and a method that diverges has a cross, also at once."""
    rounds, seeds = range(1, 41), (0.0, 9.0)
    runs = {
        "best": [(rounds, [90 + s] * 40) for s in seeds],
        "explodes": [(rounds, [50 * 2.0 ** max(0, t - 20) for t in rounds]) for _ in seeds],
        "ends": [(rounds, [70.0] * 20 + [float("nan")] * 20) for _ in seeds],
        "never": [(rounds, [float("nan")] * 40) for _ in seeds],
    }
    figure = plots.compared([plots.Compared("a", runs, {"best": [(None, 95.0)]})], "Accuracy (%)", limits=(0, 100))
    (axes,) = figure.axes
    assert axes.get_ylim()[1] < 200 and "triangles" in axes.get_title() and "never" not in axes.get_title()
    assert max(path.vertices[:, 1].max() for path in axes.collections[0].get_paths()) == 100
    crosses = [points(line)[0] for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[20, 70], [1, 0]]
    assert texts(figure) == ["best", "explodes", "ends", "never", "published", "diverges after this point"]


@pytest.mark.parametrize("rounds", [6, thorough(60)])  # with markers, and without
def test_lines_on_each_other_can_all_be_seen(rounds):
    run = history(rounds)
    other = [record | {"train_loss": 2 / record["round"]} for record in run]
    near = [record | {"train_loss": 1.0001 / record["round"]} for record in run]
    figure = plots.curves({"a": run, "b": run, "c": near, "other": other}, y={"train_loss": "Loss"})
    (axes,) = figure.axes
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths[0] > widths[1] > widths[2] == widths[3], "only those that are hidden are wider"
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    low, high = axes.get_window_extent().get_points().astype(int)
    pixels = np.asarray(canvas.buffer_rgba())[::-1][low[1] : high[1], low[0] : high[0], :3]
    for line in axes.lines:
        colour = 255 * np.array(matplotlib.colors.to_rgb(line.get_color()))
        assert (abs(pixels - colour) < 2).all(-1).sum() > 150, line.get_label()


def test_what_the_legend_says_holds_in_every_panel():
    both = [0.1] * 5, [1.0] * 3 + [float("inf")] * 2
    figure = plots.quadratics({"x": both, "y": (both[1], both[1])}, ["all", "some"])
    assert texts(figure) == ["x", "y (diverged in round 4)", "diverges after this point"]
    never = [record | {"kl": [float("nan")] * 3, "cka": [float("nan")] * 3} for record in history()]
    never = [record | {"train_loss": float("nan")} for record in never]
    figure = plots.agreement({"a": history(), "b": never})
    assert texts(figure) == ["a", "b (diverged in round 1)"]


def test_plots_do_not_change_the_backend():
    before = matplotlib.get_backend()
    plots.drift({"a": history(rounds=2)})
    assert matplotlib.get_backend() == before


def labels(axis):
    """Returns the labels of the ticks that can be seen."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return {tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high} - {""}


def growing(scale):
    """Returns values of this size: one, several that are equal or almost equal, or that double, or of many decades."""
    steps = np.arange(6)
    shapes = {"point": steps[:1] * 0.0, "constant": steps * 0, "close": steps * 1e-4, "doubling": steps / 5}
    return {name: scale * (1 + shape) for name, shape in shapes.items()} | {"decades": scale * 10.0**-steps}


KEYS = ("train_loss", "loss", "gain", "period_variance", "client_variance", "period_drift", "dissimilarity")
KEYS += ("sharpness", "local_sharpness", "hessian_trace", "lp_present", "lp_absent")
LISTS = ("cka", "kl", "client_drift", "update_norm", "update_cosine")


def pictures_of(values):
    """Yields every plot with numeric axes, for a run whose numbers all have these values."""
    records, data = [], fd.FederatedData(np.zeros((5, 1)), np.array([0, 1, 2, 0, 1]), [2, 3])
    for t, value in enumerate(map(float, values), 1):
        record = {"round": t, **dict.fromkeys(KEYS, value), **dict.fromkeys(LISTS, [value, value])}
        record |= {"time": t * value, "uplink_bytes": 5e5 * value, "downlink_bytes": 5e5 * value}
        records.append(record | {"accuracy": min(value, 1.0), "label_mix": [0.5, 0.25, 0.25]})
    runs = {"run": records}
    for unit in ("round", "time", "megabytes"):
        yield plots.curves(runs, x=unit)
        yield plots.rounds_to_target(runs, 0.9 * values[-1], key="gain", by=unit)
    for picture in (plots.drift, plots.updates, plots.agreement, plots.forgetting, plots.sharpness, plots.gain):
        yield picture(runs)
    yield plots.drift_story(runs, 0.9 * records[-1]["accuracy"], data)
    yield plots.fairness({"loss": values})
    yield plots.label_mix(records)
    yield plots.quadratics({"a": [values]}, ["t"])
    yield plots.compared([plots.Compared("t", {"a": [(range(1, len(values) + 1), values)]}, {})], "y")
    grid, at = np.linspace(-1, 1, 3) * values[0], np.eye(3, 2) * values[0]
    plane = fd.measures.LossPlane(grid, grid, np.resize(values, (3, 3)), None, at, ("a", "b", "c"))
    yield plots.loss_plane(plane)
    yield plots.federation(data)
    yield plots.participation([[0], [1]], 2)


SCALES = [(scale, shape) for scale in (1e-6, 0.3, 50, 1e9) for shape in growing(1.0)]
CORE = (0.3, "doubling")


@pytest.mark.parametrize(("scale", "shape"), [each if each == CORE else thorough(*each) for each in SCALES])
def test_every_numeric_axis_has_two_tick_labels(scale, shape):
    for figure in pictures_of(growing(scale)[shape]):
        figure.draw_without_rendering()
        for axes in figure.axes:
            for axis in [axes.yaxis] if axes.get_label() == "<colorbar>" else [axes.xaxis, axes.yaxis]:
                shown = labels(axis)
                assert len(shown) > 1 or shown == {"run"}, (axes.get_title(), axis.axis_name, shown)


@pytest.mark.parametrize("clients", [np.zeros(2), np.int64(0), None, "a"])
def test_a_number_of_clients_of_any_type_is_no_error(clients) -> None:
    plots.curves([{"round": t, "accuracy": 0.5, "loss": 1.0, "clients": clients} for t in (1, 2)])
