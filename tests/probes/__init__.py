"""Small kernels that show what the hardware does, or what the emulator sees."""
