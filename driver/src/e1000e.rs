//! Intel's e1000e family: 82574.
//!
//! Section numbers are the public 82574 datasheet's (317694, revision 3.4); where only the chapter
//! could be confirmed from public sources, the chapter is named.

pub mod descriptors;
pub mod format;
