"""What a checkpoint holds, how it is written and verified, how a run resumes. Imports core, distributed and data."""
