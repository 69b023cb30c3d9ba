"""Files between Ladon and the Python packages safetensors and numpy (and ml_dtypes for bfloat16).

Usage: interchange.py PROGRAM, the binary of interchange.cpp. Ladon's files are read by the packages
and compared, byte for byte too; then the packages write and Ladon compares. Exits with 77, which
ctest reports as skipped, where a package is missing.
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import ml_dtypes
    import numpy as np
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "bool": np.bool_, "i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16,
    "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64,
}
SHAPES = {"scalar": (), "row": (7,), "box": (2, 3, 4), "empty": (3, 0)}


def make_arrays():
    """The same as make_tensors() in interchange.cpp."""
    arrays = {}
    for name, dtype in DTYPES.items():
        for suffix, shape in SHAPES.items():
            count = np.arange(int(np.prod(shape)))
            values = count % 2 if name == "bool" else count
            arrays[f"{name}_{suffix}"] = values.astype(dtype).reshape(shape)
    return arrays


def expect_equal(got, wanted, where):
    assert got.dtype == wanted.dtype, f"{where}: dtype {got.dtype}, expected {wanted.dtype}"
    assert got.shape == wanted.shape, f"{where}: shape {got.shape}, expected {wanted.shape}"
    assert got.tobytes() == wanted.tobytes(), f"{where}: other values"


def read_ours(folder, arrays):
    """Returns how many files were the very bytes that the packages write."""
    same_bytes = 0
    with safetensors.safe_open(folder / "ours.safetensors", framework="numpy") as file:
        assert file.metadata() == {"by": "ladon"}, file.metadata()
        assert set(file.keys()) == set(arrays)
    loaded = safetensors.numpy.load_file(folder / "ours.safetensors")
    safetensors.numpy.save_file(arrays, folder / "same.safetensors", {"by": "ladon"})
    same_bytes += (folder / "same.safetensors").read_bytes() == (folder / "ours.safetensors").read_bytes()
    for name, wanted in arrays.items():
        expect_equal(loaded[name], wanted, f"ours.safetensors, {name}")
        path = folder / f"{name}.npy"
        # NumPy has no bfloat16 of its own and reads two raw bytes.
        array = np.load(path)
        expect_equal(array.view(wanted.dtype) if name.startswith("bf16") else array, wanted, path)
        np.save(folder / "same.npy", wanted)
        same_bytes += (folder / "same.npy").read_bytes() == path.read_bytes()
    return same_bytes


def write_theirs(folder, arrays):
    safetensors.numpy.save_file(arrays, folder / "theirs.safetensors", {"by": "python"})
    np.savez(folder / "theirs.npz", **arrays)
    for name, array in arrays.items():
        for order, layout in (("c", np.ascontiguousarray), ("f", np.asfortranarray)):
            ordered = layout(array).reshape(array.shape, order="A")
            np.save(folder / f"{name}.{order}_little.npy", ordered)
            # ml_dtypes knows no other byte order.
            big = ordered if name.startswith("bf16") else ordered.astype(array.dtype.newbyteorder(">"))
            np.save(folder / f"{name}.{order}_big.npy", big)
        for version in (2, 3):
            with open(folder / f"{name}.version{version}.npy", "wb") as file:
                np.lib.format.write_array(file, array, version=(version, 0))


def main():
    program = sys.argv[1]
    arrays = make_arrays()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([program, "write", folder], check=True)
        same_bytes = read_ours(folder, arrays)
        write_theirs(folder, arrays)
        subprocess.run([program, "check", folder], check=True)
    print(
        f"safetensors {safetensors.__version__}, numpy {np.__version__}: {len(arrays)} arrays both "
        f"ways; {same_bytes} of our {len(arrays) + 1} files are theirs byte for byte"
    )


if __name__ == "__main__":
    main()
