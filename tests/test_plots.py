"""Tests that plots show the numbers of the histories that they are given."""

import json

import matplotlib
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import logs, plots


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
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 2 and names[0][0] == "a" and names[1][0] == "b"  # the run without a line has no entry
    guides = [points(axes.lines[-1]) for axes in figure.axes] if picture is plots.forgetting else []
    assert all(guide == [[0, 1], [1, 1]] for guide in guides)
    assert picture is not plots.gain or names == ["a (median gain 0.31)", "b (median gain 0.31)"]


def test_agreement_is_plotted_over_local_epochs_if_there_are_several():
    records = {"a": history(rounds=8)}
    cka, kl = plots.agreement(records).axes
    values = np.array([record["kl"] for record in records["a"] if "kl" in record])  # [4 rounds, 3 epochs]
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    np.testing.assert_allclose(kl.lines[0].get_xydata(), np.stack([[1, 2, 3], median], axis=1))
    edges = kl.collections[0].get_paths()[0].vertices
    for epoch in (1, 2, 3):
        y = edges[edges[:, 0] == epoch, 1]
        np.testing.assert_allclose([y.min(), y.max()], [low[epoch - 1], high[epoch - 1]])
    assert cka.get_xlabel() == "Local epoch (median and quartiles)" and cka.get_ylabel() and kl.get_ylabel()

    records = {"a": history(epochs=1)}
    cka, _ = plots.agreement(records).axes
    assert points(cka.lines[0]) == [[record["round"], *record["cka"]] for record in records["a"] if "cka" in record]
    assert cka.get_xlabel() == "Round"


def test_many_rounds_are_shown_as_medians_of_windows():
    rounds = [{"round": t, "train_loss": float(t % 10), "clients": 1} for t in range(1, 501)]
    (loss,) = plots.curves({"long": rounds, "short": rounds[:25]}).axes
    assert points(loss.lines[0]) == [[5.5 + 10 * i, 4.5] for i in range(50)]  # each window has the values 0 to 9
    assert len(loss.lines[1].get_xdata()) == 3 and loss.get_xlabel() == "Round (median and quartiles)"


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
    edges = loss.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(sorted(set(edges[edges[:, 0] == 2, 1].round(6))), [3 - half, 3 + half], atol=1e-5)
    assert loss.get_xlabel() == "Round (mean over seeds, 95 % confidence)"

    with logs.Log(tmp_path) as log:  # a log, and the runs of a sweep, give the same plot
        for seed, history in enumerate(seeds):
            for record in history:
                log({"algorithm": "a", "seed": seed, **record})
    runs = [fd.Run(seed, {"lr": 0.1}, None, history) for seed, history in enumerate(seeds)]
    for records, name in ((tmp_path, "a"), ({"b": tmp_path}, "b"), (runs, "lr 0.1")):
        figure = plots.curves(records)
        assert points(figure.axes[0].lines[0]) == points(loss.lines[0])
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [name]
    assert not plots.curves(seeds[0]).legends  # a single history has no name

    # On a logarithmic axis, the mean and the interval are those of the logarithms.
    drifts = [[{"round": 1, "period_drift": 10.0**s}] for s in (0, 1, 2)]
    (period,) = plots.drift({"a": drifts}).axes
    edges = np.log10(period.collections[0].get_paths()[0].vertices[:, 1])
    np.testing.assert_allclose(points(period.lines[0]), [[1, 10]])
    np.testing.assert_allclose([edges.min(), edges.max()], [1 - half, 1 + half], atol=1e-6)


def test_the_plot_of_rounds_to_target_marks_bounds():
    def run(*accuracies):
        return [{"round": 10 * t, "accuracy": a} for t, a in enumerate(accuracies, 1)] + [{"round": 99}]

    records = {"there": run(0.1, 0.9), "seeds": [run(0.95), run(0.2, 0.3, 0.9)], "never": run(0.1, 0.2), "bare": run()}
    (axes,) = plots.rounds_to_target(records, 0.9).axes
    assert [bar.get_width() for bar in axes.patches] == [20, 20, 20]
    assert [bar.get_hatch() for bar in axes.patches] == [None, None, "///"]
    assert [text.get_text() for text in axes.texts] == ["20", "mean 20", "> 20"] and "90 %" in axes.get_title()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["there", "seeds", "never"]
    # A thin line starts at the evaluation before the first one that reaches the target. The last entry has the dots
    # of the seeds.
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 20], [0, 10], [20, 30], [10, 30]]
    assert "line: since the evaluation before" in axes.get_xlabel()
    (axes,) = plots.rounds_to_target({"a": [run(0.9), run(0.1)]}, 0.5).axes
    assert axes.texts[0].get_text() == "mean > 10 (1 of 2 seeds)"
    loss = [{"round": t, "train_loss": 1 / t} for t in range(1, 6)]
    (axes,) = plots.rounds_to_target(loss, 0.25, key="train_loss").axes
    assert axes.patches[0].get_width() == 4 and not axes.lines and axes.get_xlabel() == "Round"
    with pytest.raises(ValueError, match="at least 1 round with 'accuracy', got none"):
        plots.rounds_to_target(loss, 0.5)
    with pytest.raises(ValueError, match="target must be a finite number, got 'high'"):
        plots.rounds_to_target(records, "high")


def test_rounds_to_target_returns_numbers():
    def run(*values, every=10):
        return [{"round": every * t, "accuracy": a, "loss": 1 - a} for t, a in enumerate(values, 1)] + [{"round": 99}]

    records = {"there": run(0.1, 0.9, 0.2), "seeds": [run(0.95), run(0.2, 0.3)], "bare": [{"round": 1}]}
    expected = {"there": [(20, 10)], "seeds": [(10, 0), (None, 20)]}
    assert fd.rounds_to_target(records, 0.9) == fd.rounds_to_target(records, 0.1000001, key="loss") == expected
    assert fd.rounds_to_target(run(0.1, 0.6, every=1), 0.5) == {"": [(2, 1)]}
    for target, message in ((95, r"pass 0.95 for 95 %"), ("high", "a finite number, got 'high'"), (None, "got None")):
        with pytest.raises(ValueError, match=f"target must be .*{message}"):
            fd.rounds_to_target(records, target)
    with pytest.raises(ValueError, match="at least 1 round with 'cka', got none"):
        fd.rounds_to_target(records, 0.5, key="cka")


def swept(algorithm, seeds=(0, 1), settings=({},), value=0.5):
    return [
        fd.Run(seed, setting, None, [{"round": t, "accuracy": value + 0.1 * seed} for t in (1, 2)], algorithm)
        for setting in settings
        for seed in seeds
    ]


def test_runs_of_several_algorithms_and_settings_have_distinct_names(tmp_path):
    def names(records):
        figure = plots.curves(records)
        return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []

    both = swept("fedavg") + swept("feddc", value=0.7)
    assert names(both) == ["fedavg", "feddc"] and names(both[:2]) == []
    assert plots.curves(both).axes[0].lines[1].get_ydata().tolist() == pytest.approx([75, 75])
    settings = [{"lr": 0.1}, {"lr": 0.2}]
    assert names(swept("fedavg", settings=settings)) == ["lr 0.1", "lr 0.2"]
    assert names(swept("fedavg", settings=settings) + swept("feddc")) == ["fedavg, lr 0.1", "fedavg, lr 0.2", "feddc"]
    # A value of a dict may be the runs of a sweep, a single run, or a list with the folder of the log of each seed.
    assert names({"A": swept("fedavg"), "B": swept("feddc")[0]}) == ["A", "B"]
    assert names({"A": swept("fedavg", settings=settings)}) == ["A, lr 0.1", "A, lr 0.2"]
    for seed in range(2):
        with logs.Log(tmp_path / f"seed{seed}") as log:
            for record in both[seed].history:
                log(record)
    folders = [tmp_path / f"seed{seed}" for seed in range(2)]
    (line,) = plots.curves({"A": folders}).axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([55, 55])
    lines = [{"algorithm": a, "seed": s, "round": 1, "accuracy": 0.1} for a in "xy" for s in (1, 2)]
    assert names(lines) == ["x", "y"]  # as `logs.read` returns them
    for wrong, message in (
        (
            swept("fedavg") + swept("fedavg"),
            "two of fedavg with seed 0: pass a dict from a name to the result of each sweep",
        ),
        ({"A": 3}, r"records\['A'\] must be a history, .*, got a int"),
        ([both[0], {"round": 1}], "records must be a history, .* got a list of Run"),
    ):
        with pytest.raises(ValueError, match=message):
            plots.curves(wrong)


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
    before, after = figure.axes[0].lines
    np.testing.assert_allclose(before.get_xydata(), [[0, 20], [25, 20], [50, 40], [75, 60], [100, 100]])
    np.testing.assert_allclose(after.get_ydata()[1:], [30, 50, 70, 110])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["FedAvg: 20 %", "FedAvg, own model: 30 %"]
    assert [t.get_text() for t in plots.fairness({"accuracy": accuracy}).legends[0].get_texts()] == [
        "all clients: 20 %"
    ]
    figure = plots.fairness({"loss": np.array([0.5, 2.0, np.nan]), "personal_loss": np.array([0.1, 0.2, np.nan])})
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["all clients: 2", "own model: 0.2"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [2.0, 2.0, 0.5] and "Loss" in figure.axes[0].get_ylabel()
    with pytest.raises(ValueError, match="scores of at least 1 client"):
        plots.fairness({"FedAvg": {"loss": np.array([np.nan])}})
    with pytest.raises(ValueError, match="scores must be the result of Simulation.evaluate_clients"):
        plots.fairness([accuracy])


def test_plots_of_a_model_that_is_not_a_classifier():
    run = [{"round": t, "train_loss": 2.0 / t, "loss": 3.0 / t} for t in (1, 2)]
    test, train = plots.curves(run).axes
    assert points(test.lines[0]) == [[1, 3], [2, 1.5]] and "Test loss" in test.get_title()
    rows = [(np.zeros((n, 2), np.float32), np.zeros(n, np.float32)) for n in (3, 5)]
    (sizes,) = plots.federation(fd.FederatedData.from_clients(rows)).axes
    assert sizes.get_title() == "Sizes (8 examples in all)"


def test_plots_accept_records_in_all_forms(tmp_path):
    run = history(rounds=2)
    for name in ("a", "b"):
        with logs.Log(tmp_path / name, before=run):
            pass
    for records in (tmp_path, [tmp_path / "a", f"{tmp_path}/b"], {"a": tmp_path / "a", "b": run}):
        assert [text.get_text() for text in plots.curves(records).legends[0].get_texts()] == ["a", "b"]
    state = fd.ServerState(0, 0, (), ())
    for wrong, kind in (((state, run), "tuple of "), (3, "int")):
        with pytest.raises(ValueError, match=f"records must be a history.*got a {kind}"):
            plots.curves(wrong)
    with pytest.raises(ValueError, match="target must be an accuracy in 0..1, got 95: pass 0.95 for 95 %"):
        plots.rounds_to_target([{"round": 1, "accuracy": 0.5}], 95)


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
    assert [text.get_text() for text in rounds.texts] == ["> 40", "25"]
    assert (tmp_path / "story.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"at least 1 round that was measured, got none: pass measure=\('gradients'"):
        plots.drift_story([{"round": 1, "accuracy": 0.5}], 0.5, data)
    unlabelled = fd.FederatedData.from_clients([(np.ones((2, 1)), np.ones(2))])
    with pytest.raises(ValueError, match="label counts need integer labels"):
        plots.drift_story(records, 0.5, unlabelled)


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

    (axes,) = plots.label_mix(history(rounds=500, every=1)).axes
    assert sorted(set(axes.collections[0].get_offsets()[:, 0])) == list(range(1, 501, 17))
    assert "one in 17" in axes.get_title()


def test_quadratics_have_a_panel_per_setting():
    errors = {"x": [[1.0, 0.1, 0.01], [1.0, 0.5]], "y": [np.array([2.0, float("inf")]), []]}
    every, some = plots.quadratics(errors, ["all clients", "20 % a round"]).axes
    assert points(every.lines[0]) == [[1, 1], [2, 0.1], [3, 0.01]] and points(every.lines[1]) == [[1, 2]]
    assert [points(line) for line in some.lines] == [[[1, 1], [2, 0.5]]]
    assert every.get_title() == "all clients" and every.get_yscale() == "log" and every.get_ylim() == some.get_ylim()
    with pytest.raises(ValueError, match=r"errors\['x'\] must have one list per title \(1\), got 2"):
        plots.quadratics(errors, ["all clients"])


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


def test_without_measured_rounds_the_error_names_the_option():
    bare = [{"round": 1, "train_loss": 1.0}]
    names = {
        plots.drift: "gradients",
        plots.updates: "updates",
        plots.agreement: "predictions",
        plots.forgetting: "forgetting",
    }
    for picture, name in names.items():
        with pytest.raises(ValueError, match=rf"at least 1 round .*pass measure=\('{name}',\) to Simulation"):
            picture({"a": bare})
    with pytest.raises(ValueError, match=r"at least 1 round .*pass measure=\('labels',\)"):
        plots.label_mix(bare)
    with pytest.raises(ValueError, match="a run of fedeve"):
        plots.gain({"a": bare})
    with pytest.raises(ValueError, match="quadratics needs at least 1 round"):
        plots.quadratics({}, [])


def test_plots_do_not_change_the_backend():
    before = matplotlib.get_backend()
    plots.drift({"a": history(rounds=2)})
    assert matplotlib.get_backend() == before
