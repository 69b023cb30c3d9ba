"""A rival's attention, for `ladon bench --peers`.

The command starts one process of this for each rival (it holds the text; nothing is installed):

    python -I -c TEXT pytorch|onnxruntime THREADS [CPU,CPU,...]
    python -I -c TEXT pytorch|pytorch-cudnn|pytorch-flash THREADS cuda:0

Each line on standard input is a JSON object with a "command"; each gets one line on standard output:

    (at the start)  {"version": "2.9.0"}, or {"problem": "no module named ..."} and the end
    prepare         {"ready": "how"}, or {"unsupported": "why"}; makes random inputs of the case
    run             {"seconds": 0.0123} of one call of what was prepared, nothing else
    gradients       {"ready": "how"} or {"unsupported": "why"}; reads q, k, v and dout from the file
                    "inputs" and writes dq, dk and dv to the file "outputs", raw bf16 [B, S, H, D]
    release         {"ready": "released"}; forgets the case, and its memory, as all but run do

An exception is {"problem": "what it said"}, and the process goes on. At the end of the input it ends.
CPUs are given where Ladon's threads are pinned too: one for each thread.
"""

import contextlib
import gc
import json
import os
import sys
import time


class Unsupported(Exception):
    """This rival cannot do this case."""


def first_line(error):
    text = str(error).strip().split("\n")[0]
    return (text or type(error).__name__)[:300]


class PyTorch:
    """torch.nn.functional.scaled_dot_product_attention, as it chooses its kernels, or by those named."""

    def __init__(self, threads, cpus, device="cpu", kernels=None):
        if cpus:
            # Read by the OpenMP runtime when it starts.
            os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cpus))
        import torch

        self.torch = torch
        self.version = torch.__version__
        self.device, self.kernels = device, kernels
        if device != "cpu":
            torch.cuda.init()  # says what is missing
        torch.set_num_threads(threads)
        torch.manual_seed(1)

    def dtype_of(self, case):
        torch = self.torch
        names = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
        return names[case["dtype"]]

    def attend(self, case):
        """The call itself, on [batch, heads, length, dim]."""
        attention = self.torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": case["causal"]}
        if case["num_heads"] != case["num_kv_heads"]:
            if "enable_gqa" not in (attention.__doc__ or ""):
                raise Unsupported("torch %s has no enable_gqa" % self.version)
            options["enable_gqa"] = True
        return lambda q, k, v: attention(q, k, v, **options)

    def chosen_kernels(self):
        """For a with statement around calls: entering it takes longer than a small call does."""
        if self.kernels is None:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.kernels))

    def prepare(self, case):
        torch = self.torch
        dtype = self.dtype_of(case)
        batch, dim = case["batch"], case["head_dim"]
        backward = case["pass"] == "backward"

        def random(heads, length, dim=dim):
            return torch.randn(batch, heads, length, dim, dtype=dtype, device=self.device,
                               requires_grad=backward)

        attend = self.attend(case)
        q = random(case["num_heads"], case["query_len"])
        k = random(case["num_kv_heads"], case["kv_len"])
        v = random(case["num_kv_heads"], case["kv_len"], case["value_dim"])
        if backward:
            with self.chosen_kernels():
                out = attend(q, k, v)
            dout = torch.randn_like(out, requires_grad=False)
            call = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        else:
            def call():
                with torch.no_grad():
                    return attend(q, k, v)
        try:
            with self.chosen_kernels():
                call()
        except RuntimeError as error:
            if self.kernels is None:
                raise
            raise Unsupported(first_line(error))  # these kernels do not take the case
        return self.timed_call(call), "scaled_dot_product_attention"

    def timed_call(self, call):
        """On a GPU calls return when they are enqueued: gives the seconds of one of several in a row."""
        if self.device == "cpu":
            return call
        torch = self.torch

        def seconds_of(times):
            with self.chosen_kernels():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(times):
                    call()
                torch.cuda.synchronize()
                return (time.perf_counter() - begin) / times

        seconds_of(2)
        times = max(1, min(200, int(2e-2 / seconds_of(3))))
        return lambda: seconds_of(times)

    def gradients(self, case):
        torch = self.torch
        batch, dim = case["batch"], case["head_dim"]
        data = bytearray(open(case["inputs"], "rb").read())
        at = 0

        def take(heads, length):
            nonlocal at
            count = batch * length * heads * dim
            flat = torch.frombuffer(data, dtype=torch.bfloat16, count=count, offset=at)
            at += 2 * count
            flat = flat.to(self.device)
            return flat.reshape(batch, length, heads, dim).transpose(1, 2).contiguous()

        attend = self.attend(case)
        q = take(case["num_heads"], case["query_len"]).requires_grad_()
        k = take(case["num_kv_heads"], case["kv_len"]).requires_grad_()
        v = take(case["num_kv_heads"], case["kv_len"]).requires_grad_()
        dout = take(case["num_heads"], case["query_len"])
        with open(case["outputs"], "r+b") as file:
            with self.chosen_kernels():
                out = attend(q, k, v)
            for gradient in torch.autograd.grad(out, (q, k, v), dout):
                dense = gradient.transpose(1, 2).contiguous().view(torch.int16)
                file.write(dense.cpu().numpy().tobytes())
        return "scaled_dot_product_attention and autograd"


class OnnxRuntime:
    """The faster of the operators MultiHeadAttention (com.microsoft) and Attention (ONNX)."""

    def __init__(self, threads, cpus):
        import numpy
        import onnx
        import onnxruntime

        self.numpy, self.onnx, self.runtime = numpy, onnx, onnxruntime
        self.version = onnxruntime.__version__
        self.threads, self.cpus = threads, cpus

    def model(self, operator, case):
        """One node; inputs as it likes them: [B, S, H * D] or [B, H, S, D]."""
        helper, types = self.onnx.helper, self.onnx.TensorProto
        batch, dim = case["batch"], case["head_dim"]
        heads, kv_heads = case["num_heads"], case["num_kv_heads"]
        if operator == "MultiHeadAttention":
            def shape(count, length):
                return [batch, length, count * dim]
            node = helper.make_node(operator, ["q", "k", "v"], ["out"], domain="com.microsoft",
                                    num_heads=heads, unidirectional=int(case["causal"]))
        else:
            def shape(count, length):
                return [batch, count, length, dim]
            node = helper.make_node(operator, ["q", "k", "v"], ["out"], is_causal=int(case["causal"]))
        shapes = {"q": shape(heads, case["query_len"]), "k": shape(kv_heads, case["kv_len"]),
                  "v": shape(kv_heads, case["kv_len"]), "out": shape(heads, case["query_len"])}
        value = {name: helper.make_tensor_value_info(name, types.FLOAT, dims)
                 for name, dims in shapes.items()}
        graph = helper.make_graph([node], "attention", [value["q"], value["k"], value["v"]],
                                  [value["out"]])
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return model.SerializeToString(), shapes

    def session(self, model):
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Spinning is part of its speed, but not while others have their turn.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if self.cpus and self.threads > 1:
            # All but the calling thread; CPUs count from 1 there.
            affinities = ";".join(str(cpu + 1) for cpu in self.cpus[1:])
            options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
        session = self.runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        if self.cpus and self.threads > 1:
            os.sched_setaffinity(0, [self.cpus[0]])
        return session

    def bind(self, operator, case):
        model, shapes = self.model(operator, case)
        session = self.session(model)
        binding = session.io_binding()
        generator = self.numpy.random.default_rng(1)
        values = {}
        for name in ("q", "k", "v"):
            array = generator.standard_normal(shapes[name], dtype=self.numpy.float32)
            values[name] = self.runtime.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, values[name])
        out = self.numpy.zeros(shapes["out"], dtype=self.numpy.float32)
        values["out"] = self.runtime.OrtValue.ortvalue_from_numpy(out)
        binding.bind_ortvalue_output("out", values["out"])
        # The values must live as long as the call.
        return lambda keep=values: session.run_with_iobinding(binding)

    def prepare(self, case):
        if case["pass"] == "backward":
            raise Unsupported("no backward")
        if case["dtype"] != "f32":
            raise Unsupported("no %s attention on CPUs" % case["dtype"])
        if case["value_dim"] != case["head_dim"]:
            raise Unsupported("values of another size are not measured")
        operators = ["Attention"]
        if case["num_heads"] == case["num_kv_heads"]:
            operators.append("MultiHeadAttention")
        best, why = None, ""
        for operator in operators:
            try:
                call = self.bind(operator, case)
                seconds = min(timed(call) for _ in range(3))
            except Exception as error:  # an operator that this version lacks, or memory
                why = first_line(error)
                continue
            if best is None or seconds < best[0]:
                best = (seconds, call, operator)
        if best is None:
            raise Unsupported(why)
        return best[1], best[2]

    def gradients(self, case):
        raise Unsupported("no backward")


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def answer(rival, state, request):
    command = request["command"]
    if command == "run":
        begin = time.perf_counter()
        own = state["call"]()  # of calls that have their own clock
        return {"seconds": own if isinstance(own, float) else time.perf_counter() - begin}
    state.clear()
    gc.collect()
    if command == "release":
        return {"ready": "released"}
    try:
        if command == "prepare":
            state["call"], how = rival.prepare(request)
        elif command == "gradients":
            how = rival.gradients(request)
        else:
            return {"problem": "no command " + command}
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    return {"ready": how}


def main():
    # Libraries print; the line is for answers alone.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message):
        out.write(json.dumps(message) + "\n")
        out.flush()

    name, threads = sys.argv[1], int(sys.argv[2])
    place = sys.argv[3] if len(sys.argv) > 3 else ""
    device = place if place.startswith("cuda") else "cpu"
    cpus = [int(cpu) for cpu in place.split(",")] if place and device == "cpu" else []
    try:
        if name == "onnxruntime":
            rival = OnnxRuntime(threads, cpus)
        else:
            kernels = {"pytorch": None, "pytorch-cudnn": "CUDNN_ATTENTION",
                       "pytorch-flash": "FLASH_ATTENTION"}[name]
            rival = PyTorch(threads, cpus, device, kernels)
    except Exception as error:
        say({"problem": first_line(error)})
        return
    gc.disable()
    say({"version": rival.version})
    state = {}
    for line in sys.stdin:
        try:
            say(answer(rival, state, json.loads(line)))
        except Exception as error:
            say({"problem": first_line(error)})


main()
