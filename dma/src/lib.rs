//! DMA memory, the ledger and release proofs.
