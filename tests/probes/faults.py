"""A kernel that leaves out what it must do: see faults.cu."""

from pathlib import Path

SOURCE = Path(__file__).with_name("faults.cu").read_text("utf-8")
ENTRY, POINTERS = "faulty", ("a", "b", "out")
THREADS, SHARED_MEMORY = 128, 32 << 10
