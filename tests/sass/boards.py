"""The boards of the comparison with published figures."""

from flashsmith.sass import Board, memory_path

KB = 1024
T4 = Board("T4", 75, 40, 1.59, 1024.0, 64 * KB, 1024, 65536, 16.0, 235.0, 320.0, path=memory_path(75))
A100 = Board("A100", 80, 108, 1.41, 2048.0, 164 * KB, 2048, 65536, 16.0, 270.0, 2039.0)
H100 = Board("H100", 90, 132, 1.755, 4 * 4096 / 6, 228 * KB, 2048, 65536, 32.0, 280.0, 3350.0)
RTX4090 = Board("RTX 4090", 89, 128, 2.52 * 1.02, 512.0, 100 * KB, 1536, 65536, 15.0, 300.0, 1008.0)
RTX5090 = Board("RTX 5090", 120, 170, 2.41, 512.0, 100 * KB, 1536, 65536, 15.0, 360.0, 1792.0)
