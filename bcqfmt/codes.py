"""Every code the program can report, in one table.

``BCQ-Vnnn`` are the rules of ``spec/bcq-1.0.md`` and ``spec/provenance-1.0.md``; a test compares the lists.
``BCQ-Ennn`` is everything else that can go wrong: the machine, the arguments, inputs that are something other than BCQ. Codes are stable:
they are never renumbered and never reused.

Exit codes: 0 ok, 1 bug, 2 usage, 3 input missing, 4 malformed, 5 valid but unsupported, 6 verification
mismatch, 7 output problem, 8 network, 9 refused for resources.
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """One entry of the registry; ``severity`` is ``error``, ``warning`` or ``note``."""

    code: str
    title: str
    exit: int
    hint: str = ""
    severity: str = "error"


_AGAIN = "download the file again or, if it was made here, repeat the command that made it"
_FOLDER = "or, if the folder was made here, repeat the command that made it"
_SEAL = f"{_AGAIN}; if it was changed on purpose: bcqfmt seal FOLDER"
_WRITER = "the file was not written by a correct writer; write it again with bcqfmt"
_GGUF = "download the file again; if that does not help, make it again with a current llama.cpp"

# fmt: off
_TABLE = [
    # container
    Code("BCQ-V101", "file too short for a header length", 4, _AGAIN),
    Code("BCQ-V102", "header length out of range", 4, f"{_AGAIN}; if that does not help it is no safetensors file, or has too many tensors"),
    Code("BCQ-V103", "header longer than the file", 4, _AGAIN),
    Code("BCQ-V104", "header does not begin with '{'", 4, _WRITER),
    Code("BCQ-V105", "header is not valid UTF-8 text", 4, _WRITER),
    Code("BCQ-V106", "header is not the JSON that the format allows", 4, _WRITER),
    Code("BCQ-V107", "duplicate key", 4, _WRITER),
    Code("BCQ-V108", "too many tensors", 4, "split the checkpoint into more shards"),
    Code("BCQ-V109", "malformed tensor entry", 4, _WRITER),
    Code("BCQ-V110", "unknown element type", 5, "a newer bcqfmt may know it: install the latest (README, Install)"),
    Code("BCQ-V111", "tensor too large", 4, _WRITER),
    Code("BCQ-V112", "size of a tensor does not follow from its shape", 4, _WRITER),
    Code("BCQ-V113", "tensors overlap", 4, _WRITER),
    Code("BCQ-V114", "hole between tensors", 4, _WRITER),
    Code("BCQ-V115", "bytes after the last tensor", 4, _AGAIN),
    Code("BCQ-V116", "data is cut short", 4, _AGAIN),
    Code("BCQ-V117", "tensor not aligned to its type", 4, _WRITER),
    Code("BCQ-V118", "__metadata__ is not an object of strings", 4, _WRITER),
    Code("BCQ-V119", "tensor name too long", 4, _WRITER),
    Code("BCQ-V120", "tensor names collide", 4, "rename one of them in the source"),
    # descriptor
    Code("BCQ-V201", "not a BCQ file", 5, "a plain or otherwise quantized checkpoint has to be converted; one whose __metadata__ was lost has to be written again with bcqfmt"),
    Code("BCQ-V202", "__metadata__ lacks format = pt", 4, _WRITER),
    Code("BCQ-V203", "descriptor is not the JSON that the format allows", 4, _WRITER),
    Code("BCQ-V204", "descriptor is not canonical", 4, _WRITER),
    Code("BCQ-V205", "format version not supported", 5, f"a later one needs the latest bcqfmt (README, Install); a file without one is damaged: {_AGAIN}"),
    Code("BCQ-V206", "unknown feature", 5, "install the latest bcqfmt (README, Install)"),
    Code("BCQ-V207", "features do not match their use", 4, _WRITER),
    Code("BCQ-V208", "descriptor does not fit the schema", 4, _WRITER),
    Code("BCQ-V209", "scheme table and weights do not match", 4, _WRITER),
    Code("BCQ-V210", "shape of a weight not supported", 5, "matrices and stacks of matrices up to 2^31-1 a side and 2^40 bits in all can be stored"),
    Code("BCQ-V211", "segment widths do not match the weight", 4, _WRITER),
    Code("BCQ-V212", "group size does not fit its segment", 4, _WRITER),
    Code("BCQ-V213", "name of a weight not allowed", 4, _WRITER),
    Code("BCQ-V214", "name claimed twice", 4, _WRITER),
    Code("BCQ-V215", "weight does not fit the layout aligned64", 4, "the canonical layout can hold it"),
    # parts
    Code("BCQ-V301", "part missing", 4, _WRITER),
    Code("BCQ-V302", "part that belongs to no weight", 4, _WRITER),
    Code("BCQ-V303", "part has the wrong type", 4, _WRITER),
    Code("BCQ-V304", "part has the wrong shape", 4, _WRITER),
    # content
    Code("BCQ-V401", "padding bits are not zero", 4, _WRITER),
    Code("BCQ-V404", "zero point out of range", 4, _WRITER),
    Code("BCQ-V405", "infinity or NaN", 4, "only the feature `nonfinite` allows it (Python: weight.allow_nonfinite())"),
    Code("BCQ-V406", "perm is not a permutation", 4, _WRITER),
    Code("BCQ-V407", "outlier row pointers are not a rising sequence from 0 to nnz", 4, _WRITER),
    Code("BCQ-V408", "outlier columns out of range or not rising", 4, _WRITER),
    Code("BCQ-V409", "outlier in a segment that may have none", 4, _WRITER),
    Code("BCQ-V410", "too many outliers", 9, "a dense tensor is smaller than that many outliers"),
    Code("BCQ-V411", "a byte that is no UE4M3 number", 4, _WRITER),
    # folder
    Code("BCQ-V501", "malformed index", 4, _AGAIN),
    Code("BCQ-V502", "index names a file that is no plain .safetensors name", 4, "do not use this checkpoint: plain file names are the only ones a writer makes"),
    Code("BCQ-V503", "shard missing", 3, f"download the missing files {_FOLDER}"),
    Code("BCQ-V504", "index and shards disagree", 4, _AGAIN),
    Code("BCQ-V505", "tensor in two shards", 4, _WRITER),
    Code("BCQ-V506", "more than one model in the folder", 2, "leave the files of one model in the folder and move the others elsewhere"),
    Code("BCQ-V507", "link leaves the folder", 4, "put the file itself in place of the link; a GGUF file may be named itself"),
    Code("BCQ-V508", "not a regular file", 3, "only regular files are read"),
    Code("BCQ-V510", "config.json missing", 3, "copy it from the original model"),
    Code("BCQ-V511", "malformed config.json", 4, _AGAIN),
    Code("BCQ-V512", "quantization_config does not match the files", 4, _WRITER),
    Code("BCQ-V513", "files of different versions", 4, _WRITER),
    # manifest
    Code("BCQ-V601", "no manifest: the checkpoint is unfinished", 4, "finish or repeat the run that writes it"),
    Code("BCQ-V602", "malformed manifest", 4, _AGAIN),
    Code("BCQ-V603", "the manifest's own digest is wrong", 6, _AGAIN),
    Code("BCQ-V604", "file of the manifest missing", 4, f"download it {_FOLDER}; if it was removed on purpose: bcqfmt seal FOLDER"),
    Code("BCQ-V605", "file size differs from the manifest", 6, _SEAL),
    Code("BCQ-V606", "file digest differs from the manifest", 6, _SEAL),
    Code("BCQ-V608", "manifest and files describe different weights", 4, _WRITER),
    Code("BCQ-V609", "part of the model that the manifest does not name", 4, "remove it; if it belongs to the model: bcqfmt seal FOLDER --accept"),
    # provenance
    Code("BCQ-V701", "malformed provenance record", 4, _AGAIN),
    Code("BCQ-V702", "archived source file missing or changed", 6, _AGAIN),
    Code("BCQ-V703", "rules and source tensors do not match", 4, _WRITER),
    Code("BCQ-V704", "archive of raw tensors does not match the rules", 4, _WRITER),
    # inputs
    Code("BCQ-E101", "no such file or folder", 3, "check the spelling"),
    Code("BCQ-E102", "cannot be read", 3, "check the permissions and the disk"),
    Code("BCQ-E103", "changed while it was being read", 3, "wait until the other program is done, then try again"),
    Code("BCQ-E104", "folder holds no model", 3, "a checkpoint folder has model.safetensors, model.safetensors.index.json or one GGUF model"),
    Code("BCQ-E105", "only pickled weights", 5, "bcqfmt never opens pickles; get or make the safetensors version of this model"),
    Code("BCQ-E201", "git-lfs pointer instead of the file", 4, "fetch the real file: git lfs pull, or hf download"),
    Code("BCQ-E202", "web page or error text instead of the file", 4, "download the file again"),
    Code("BCQ-E203", "another kind of file", 5, "bcqfmt reads safetensors files, and GGUF files whose names end in .gguf"),
    Code("BCQ-E204", "the safetensors library refuses the file", 4, "please report this file: the two readers should agree"),
    # GGUF files
    Code("BCQ-E211", "not a GGUF file", 4, "check the name; if it should be GGUF, download the file again"),
    Code("BCQ-E212", "version of GGUF not supported", 4, "make it again with a current llama.cpp, which writes version 3"),
    Code("BCQ-E213", "GGUF file is cut short", 4, _AGAIN),
    Code("BCQ-E214", "malformed key value of a GGUF file", 4, _GGUF),
    Code("BCQ-E215", "malformed tensor info of a GGUF file", 4, _GGUF),
    Code("BCQ-E216", "tensor of a GGUF file not where it has to be", 4, _GGUF),
    Code("BCQ-E217", "tensor type of a GGUF file unknown", 4, "make the file again with a current llama.cpp; a newer type may need the latest bcqfmt (README, Install)"),
    Code("BCQ-E218", "files of a split GGUF do not belong together", 4, "put all files of one split, and of no other, into one folder"),
    Code("BCQ-E219", "header of a GGUF file too long", 4, _GGUF),
    # arguments
    Code("BCQ-E301", "no such tensor", 2, "`bcqfmt inspect PATH --modules` lists the quantized weights; in Python list(bcqfmt.open(PATH)) has all names"),
    Code("BCQ-E302", "argument out of range", 2, "give what is expected; in Python, the function's docstring has shapes, types and limits"),
    Code("BCQ-E303", "slice cannot be expressed as a BCQ weight", 5, "dequantize(rows=, columns=) takes any range"),
    Code("BCQ-E304", "segment cannot be read at fewer planes", 5, "read all planes"),
    Code("BCQ-E305", "weight cannot take this form", 5, ""),
    Code("BCQ-E306", "package missing or not usable", 2, ""),
    Code("BCQ-E307", "not possible on this machine", 5, "use Linux, macOS, or Linux under Windows (WSL)"),
    # outputs
    Code("BCQ-E401", "output exists", 7, "choose another name, or add --overwrite (Python: overwrite=True)"),
    Code("BCQ-E402", "output cannot be written", 7, "check the permissions, the free space and the file system"),
    Code("BCQ-E403", "output is in use", 7, "wait until the other run is done"),
    Code("BCQ-E404", "conversion is not complete", 7, "run the missing parts, or convert again with --resume"),
    Code("BCQ-E405", "weights or archived source changed: the manifest stays as it is", 6, f"download those files again {_FOLDER}; if the change is meant: bcqfmt seal FOLDER --accept"),
    Code("BCQ-E801", "not enough memory allowed", 9, "raise --memory-limit"),
    Code("BCQ-E802", "not enough disk space", 9, "free some, or choose another place"),
    Code("BCQ-E803", "more than a model has", 9, "a folder holds one model and its own files; keep everything else elsewhere"),
    # converting
    Code("BCQ-E601", "a kind of checkpoint that is not converted", 5, "the documentation lists the layouts that are"),
    Code("BCQ-E602", "configuration contradicts itself or the tensors", 4, "correct the configuration, or download the one that the model was published with"),
    Code("BCQ-E603", "module incomplete", 4, "download the missing tensors"),
    Code("BCQ-E604", "tensors do not fit the layout", 4, "correct the configuration if it is wrong (bits, group_size, quant_method), else download the model again"),
    Code("BCQ-E605", "zero points can be read in several ways", 4, "decide with --zero-point"),
    Code("BCQ-E606", "g_idx out of range", 4, _AGAIN),
    Code("BCQ-E607", "groups of unequal size", 5, "such a grouping has no place in the format"),
    Code("BCQ-E608", "bits or group size not supported", 5, "the documentation lists what each layout can have"),
    Code("BCQ-E609", "infinities or NaNs among the scales", 4, "keep them as they are with --allow-nonfinite"),
    Code("BCQ-E610", "dense checkpoint", 2, "quantize it: bcqfmt quantize SRC DST --method rtn"),
    Code("BCQ-E611", "too little of the checkpoint is quantized", 5, "lower --min-coverage if that is as it should be"),
    Code("BCQ-E612", "already a BCQ checkpoint", 2, "look at it: bcqfmt inspect PATH"),
    Code("BCQ-E613", "verification failed", 6, "find out whether a file was damaged: bcqfmt validate --deep BCQ; if none was, please report it"),
    Code("BCQ-E614", "source cannot be rebuilt", 5, "it was written without its source, or converted with --no-provenance"),
    Code("BCQ-E615", "unknown rule", 5, "install the latest bcqfmt (README, Install)"),
    Code("BCQ-E616", "not lossless in that layout", 5, "export --to dense always works"),
    Code("BCQ-E617", "file of the source has a name that the output cannot have", 5, "copy the source without this file, or give it another name there"),
    Code("BCQ-E618", "pattern of the configuration cannot be used", 5, "simplify it in the configuration: characters, classes, groups, |, * + ? {m,n}, ^ $ and lookaheads are understood"),
    # quantizing
    Code("BCQ-E620", "setting of a method unknown or out of range", 2, "`bcqfmt quantize --help` lists methods and settings"),
    Code("BCQ-E621", "matrix does not fit the method", 5, "leave it dense (--exclude NAME, or a rule), or choose another method or setting"),
    Code("BCQ-E622", "weight is not finite", 4, "the model is damaged: a quantized NaN or infinity would mean nothing"),
    Code("BCQ-E623", "calibration statistics missing", 2, "add --text FILE, or make statistics: bcqfmt calibrate MODEL --text FILE"),
    Code("BCQ-E624", "calibration statistics of another model", 4, "calibrate the model that is to be quantized"),
    Code("BCQ-E625", "rule matches nothing", 2, "correct the pattern; `bcqfmt inspect PATH --modules` lists the names"),
    Code("BCQ-E626", "malformed rule file", 4, "the documentation shows an example"),
    Code("BCQ-E627", "already quantized", 2, "convert it, without loss: bcqfmt convert SRC DST"),
    Code("BCQ-E628", "malformed record of a quantization", 4, _AGAIN),
    Code("BCQ-E629", "malformed calibration statistics", 4, "make them again: bcqfmt calibrate MODEL --text FILE"),
    Code("BCQ-E630", "calibration text too short", 2, "give a longer text, fewer rows (-n) or shorter ones (--context)"),
    Code("BCQ-E631", "model card that a hub cannot read", 4, "correct the lines between the two --- at the top of README.md"),
    Code("BCQ-E632", "model gives NaN or infinity", 4, "its numbers are damaged, or read wrongly: see 'My model prints !!!!' in the documentation"),
    Code("BCQ-E651", "g_idx and desc_act disagree; the tensor counts", 0, "", "warning"),
    Code("BCQ-E652", "configuration holds calibration text, which is archived with it", 0, "--no-provenance leaves the archive out", "warning"),
    Code("BCQ-E653", "not everything in the source is carried", 0, "", "warning"),
    Code("BCQ-E654", "configuration and tensors disagree about tied embeddings; the tensors count", 0, "", "warning"),
    Code("BCQ-E655", "zero points are read otherwise than the configuration says, as asked", 0, "", "warning"),
    Code("BCQ-E656", "tensors keep the names of GGUF", 0, "", "warning"),
    Code("BCQ-E657", "the file lacks what config.json needs", 0, "put the model's own config.json into the result", "warning"),
    Code("BCQ-E640", "donor of metadata is not a file of this model", 5, "name another GGUF file of the same model with --like"),
    Code("BCQ-E641", "metadata of a GGUF file cannot be written", 5, "take it from a GGUF file of the same model: --like donor.gguf"),
    Code("BCQ-E658", "rows are short for this scheme", 0, "choose rtn or bcq, or larger groups, for a model with rows as short as these", "warning"),
    # network
    Code("BCQ-E701", "repository not found on the hub", 8, "check the name; private ones need: hf auth login"),
    Code("BCQ-E702", "access denied by the hub", 8, "ask for access on the model's page, then: hf auth login"),
    Code("BCQ-E703", "the hub limits requests", 8, "wait a while, then try again"),
    Code("BCQ-E704", "network failure", 8, "check the connection, then try again"),
    Code("BCQ-E705", "offline, and not in the cache", 8, "download it once while online"),
    Code("BCQ-E706", "download incomplete or changed", 8, "try again; finished files are not downloaded twice"),
    Code("BCQ-E707", "revision not found on the hub", 8, "check the branch, tag or commit"),
    Code("BCQ-E708", "the hub sends more than it should", 8, "check HF_ENDPOINT; do not use a hub that does this"),
    Code("BCQ-E709", "repository that this folder cannot go to", 8, "name another repository"),
    # clusters
    Code("BCQ-E710", "Ray cluster cannot be reached", 8, "start one (ray start --head), or give the address of one that runs: --ray-address HOST:PORT"),
    Code("BCQ-E711", "a node of the cluster sees another source, or has another bcqfmt", 8, "install the same bcqfmt on every node, and mount SRC and DST under the same paths"),
    Code("BCQ-E712", "a task on the cluster was lost or failed", 8, "look at the node's memory and logs (ray status), then go on with --resume"),
    # kernels
    Code("BCQ-E551", "no usable GPU", 5, "use the CPU (--device cpu); `bcqfmt doctor` shows what is missing"),
    Code("BCQ-E552", "argument that a kernel cannot take", 2, "pass what is expected; the function's docstring has shapes, types and limits"),
    Code("BCQ-E553", "weight that this kernel cannot take", 5, "bcqfmt.kernels.matmul chooses one that can"),
    Code("BCQ-E554", "too large for a kernel", 9, "slice the weight by rows"),
    # remarks
    Code("BCQ-E501", "content is covered by no digest", 0, "validate the folder it belongs to", "note"),
    Code("BCQ-E502", "__metadata__ lost; the manifest describes the file instead", 0, "write the folder again with bcqfmt", "warning"),
    Code("BCQ-E503", "infinities or NaNs among the numbers", 0, "the scheme allows it (`nonfinite`)", "warning"),
    Code("BCQ-E504", "documentation is covered by no digest", 0, "", "note"),
    Code("BCQ-E505", "file is covered by no digest", 0, "if it belongs to the model, take it into the manifest: bcqfmt seal FOLDER", "note"),
    Code("BCQ-E901", "interrupted", 130, ""),
    Code("BCQ-E999", "unexpected error", 1, "please report it, with --debug"),
]
# fmt: on

CODES: dict[str, Code] = {entry.code: entry for entry in _TABLE}
RETIRED = frozenset(
    {"BCQ-V402", "BCQ-V403", "BCQ-V607"}
)  # rules that no longer exist; their numbers are never given again
