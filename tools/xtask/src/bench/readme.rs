//! Tables in README.md that benchmarks write.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Replaces what stands between the two comments that have this name.
pub(super) fn put(file: &Path, name: &str, text: &str) -> Result<()> {
    let whole = fs::read_to_string(file)?;
    let whole = replaced(&whole, name, text)
        .with_context(|| format!("{} has no block {name}", file.display()))?;
    Ok(fs::write(file, whole)?)
}

fn replaced(whole: &str, name: &str, text: &str) -> Option<String> {
    let (begin, end) = (
        format!("<!-- bench: {name} -->\n"),
        format!("<!-- end: {name} -->"),
    );
    let (before, rest) = whole.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{text}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "a\n<!-- bench: x -->\nold\n<!-- end: x -->\nb\n";

    #[test]
    fn the_block_is_replaced_and_nothing_else() {
        let expected = "a\n<!-- bench: x -->\nnew\n<!-- end: x -->\nb\n";
        assert_eq!(replaced(WHOLE, "x", "new\n").as_deref(), Some(expected));
    }

    #[test]
    fn a_file_without_the_block_is_left_alone() {
        assert_eq!(replaced(WHOLE, "y", "new\n"), None);
        assert_eq!(replaced("<!-- bench: x -->\n", "x", "new\n"), None);
    }
}
