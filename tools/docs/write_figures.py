#!/usr/bin/env python3
"""Writes figures.js of the cache calculator, from what `ladon plan --json` prints.

    write_figures.py --ladon PROGRAM figures.js
"""

import argparse
import collections
import json
import pathlib
import subprocess

DTYPES = ("f32", "bf16", "f16", "i8")


def plan(ladon, dtype):
    command = [ladon, "plan", "--dtype", dtype, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["models"]


def figures(ladon):
    models = []
    for dtype in DTYPES:
        for index, model in enumerate(plan(ladon, dtype)):
            if dtype == DTYPES[0]:
                models.append({
                    "name": model["name"], "title": model["title"], "kind": model["kind"],
                    "numLayers": model["num_layers"], "numHeads": model["num_heads"],
                    "headDim": model["head_dim"], "weightBytes": model["weight_bytes"],
                    "maxContext": model["max_context"],
                    # [window, layers that have it]; 0 is none.
                    "windows": sorted(collections.Counter(model["windows"]).items()),
                    "caches": [{"kind": row["kind"], "details": row["details"], "own": row["own"],
                                "layerBytes": {}} for row in model["caches"]],
                })
            for cache, row in zip(models[index]["caches"], model["caches"]):
                per_layer, rest = divmod(row["bytes_per_token"], model["num_layers"])
                assert rest == 0, f"{model['name']}: layers of different size"
                cache["layerBytes"][dtype] = per_layer
    return {"dtypes": DTYPES, "models": models}


def write(ladon, path):
    path.write_text(f"// Written by tools/docs/write_figures.py.\nwindow.ladonFigures = {json.dumps(figures(ladon))};\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladon", required=True)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    write(arguments.ladon, arguments.output)


if __name__ == "__main__":
    main()
