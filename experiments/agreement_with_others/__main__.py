"""Compares our algorithms with other people's code, and writes docs/agreement.md.

    python -m experiments.agreement_with_others FOLDER [--only fl_simulator pfllib ...]

FOLDER has a clone of each repository of `SOURCES`, with the name of the repository. The other code needs PyTorch and
scikit-learn, and that of FedSA-LoRA also grpcio, pympler and wandb. Every script runs in a process of its own, because
different repositories have modules of the same name. The exit status is 1 if a difference has changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.agreement_with_others import page

SOURCES = {  # script: (repository, what it is)
    "fl_simulator": ("woodenchild95/FL-Simulator", "By the authors of FedSpeed and FedSMOO."),
    "pfllib": ("TsingZ0/PFLlib", "A library of personalised algorithms."),
    "fl_bench": ("KarhouTam/FL-bench", "A benchmark of many algorithms."),
    "niid_bench": ("Xtra-Computing/NIID-Bench", "A benchmark of partitions, by the authors of MOON."),
    "fednova": ("JYWa/FedNova", "By the authors of FedNova."),
    "fedexp": ("Divyansh03/FedExP", "By the authors of FedExP."),
    "fedacg": ("geehokim/FedACG", "By the authors of FedACG, with copies of other algorithms."),
    "fedntd": ("Lee-Gihun/FedNTD", "By the authors of FedNTD, with copies of other algorithms."),
    "simple_fl": ("tao-shen/simple-FL", "By the authors of FedEve."),
    "feddyn": ("alpemreacar/FedDyn", "By the authors of FedDyn."),
    "feddc": ("gaoliang13/FedDC", "By the authors of FedDC, with copies of other algorithms."),
    "moon": ("QinbinLi/MOON", "By the authors of MOON."),
    "fedadamw": ("junkangLiu0/FedAdamW", "By the authors of FedAdamW, with copies of other algorithms."),
    "fedlesam": ("MediaBrain-SJTU/FedLESAM", "By the authors of FedLESAM."),
    "fedreg": ("Zoesgithub/FedReg", "By the authors of FedReg."),
    "pfedme": ("CharlieDinh/pFedMe", "By the authors of pFedMe."),
    "fedtorch": ("MLOPTPSU/FedTorch", "By the authors of APFL."),
    "fedrep": ("lgcollins/FedRep", "By the authors of FedRep."),
    "fedbabu": ("jhoon-oh/FedBABU", "By the authors of FedBABU."),
    "fedbn": ("med-air/FedBN", "By the authors of FedBN."),
    "lg_fedavg": ("pliang279/LG-FedAvg", "By the authors of LG-FedAvg."),
    "feddecorr": ("bytedance/FedDecorr", "By the authors of FedDecorr."),
    "fedjax": ("google/fedjax", "A library by Google."),
    "fedsim": ("varnio/fedsim", "By the authors of AdaBest."),
    "ghbm": ("RickZack/GHBM", "By the authors of GHBM, with copies of other algorithms."),
    "fl_sam": ("harrylee999/FL-SAM", "By the authors of FedGMT."),
    "fedsol": ("Lee-Gihun/FedSOL", "By the authors of FedSOL, with a copy of Per-FedAvg."),
    "per_fedavg": ("KarhouTam/Per-FedAvg", "By the author of FL-bench."),
    "fair_flearn": ("litian96/fair_flearn", "By the authors of q-FedAvg, with a copy of AFL."),
    "ifca": ("jichan3751/ifca", "By the authors of IFCA."),
    "fedswa": ("junkangLiu0/FedSWA", "By the authors of FedSWA and FedMoSWA."),
    "fedau": ("IBM/fedau", "By the authors of FedAU, with copies of FedVARP and MIFA."),
    "mifa": ("hmgxr128/MIFA_code", "By the authors of MIFA."),
    "feddf": ("epfml/federated-learning-public-code", "By the authors of FedDF."),
    "fedproto": ("yuetan031/FedProto", "By the authors of FedProto."),
    "fedex_lora": ("RaghavSinghal10/fedex-lora", "By the authors of FedEx-LoRA."),
    "fedsa_lora": ("Pengxin-Guo/FedSA-LoRA", "By the authors of FedSA-LoRA, on FederatedScope."),
}


def run(script: str, checkout: Path) -> list[dict[str, Any]]:
    """The rows of one script, which runs in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        program = Path(__file__).with_name(f"{script}.py")
        done = subprocess.run([sys.executable, program, checkout, output], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
        return json.loads(output.read_text())


def git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", checkout, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the clones")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES), help="scripts, default: all")
    arguments = parser.parse_args()
    results = json.loads(page.RESULTS.read_text()) if page.RESULTS.exists() else {}
    changed: list[str] = []
    for script in arguments.only:
        repository, about = SOURCES[script]
        checkout = arguments.folder / repository.split("/")[1]
        if not (checkout / ".git").exists():
            raise SystemExit(f"{checkout} is missing: git clone https://github.com/{repository} {checkout}")
        if edited := git(checkout, "diff", "--name-only", "--diff-filter=M", "HEAD"):
            raise SystemExit(f"{checkout} has changes, compare with the published code: {edited}")
        commit, date = git(checkout, "log", "-1", "--format=%H %cs").split()
        rows = run(script, checkout.resolve())
        changed += [f"{script}: {line}" for line in page.changes(results.get(script, {}).get("rows", []), rows)]
        results[script] = {"repository": repository, "about": about, "commit": commit, "date": date, "rows": rows}
        print(f"{script}: " + ", ".join(f"{row['algorithm']} {row['difference']:.0e}" for row in rows), flush=True)
        ordered = {name: results[name] for name in SOURCES if name in results}
        page.RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        page.write()
    if changed:
        raise SystemExit("\n".join(changed))


if __name__ == "__main__":
    main()
