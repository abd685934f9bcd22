//! The emulated 82576.
