"""Programs that use the library: papers' tables (`experiments.tables`), benchmarks and other studies."""
