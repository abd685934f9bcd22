//! `failstop list`: the machine's network functions.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use failstop::pci::sysfs::{Function, Sysfs};
use serde::Serialize;

use crate::exit::Exit;

/// Options of `failstop list`.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Prints a JSON array instead of a table.
    #[arg(long)]
    json: bool,
}

/// One line of the list.
#[derive(Serialize)]
struct Line {
    address: String,
    /// Vendor and device ID, like `8086:10c9`.
    id: String,
    name: String,
    driver: Option<String>,
    iommu_group: Option<u32>,
    /// How many other functions share its group.
    siblings: usize,
    numa_node: Option<u32>,
    interfaces: Vec<String>,
    physical_function: Option<String>,
}

impl Line {
    fn new(function: &Function) -> Self {
        let identity = function.identity;
        let group = function.group.as_ref();
        Self {
            address: function.address.to_string(),
            id: format!("{:04x}:{:04x}", identity.vendor, identity.device),
            name: function
                .device_name()
                .unwrap_or("unknown device")
                .to_owned(),
            driver: function.driver.clone(),
            iommu_group: group.map(|group| group.number),
            siblings: group.map_or(0, |group| {
                let others = group.members.iter();
                others
                    .filter(|member| member.address != function.address)
                    .count()
            }),
            numa_node: function.numa_node,
            interfaces: function
                .interfaces
                .iter()
                .map(|interface| interface.name.clone())
                .collect(),
            physical_function: function
                .physical_function
                .map(|address| address.to_string()),
        }
    }
}

/// Prints the list.
pub(crate) fn list(args: &ListArgs, sysfs: &Sysfs, out: &mut dyn Write) -> Result<Exit> {
    let functions = sysfs.network_functions()?;
    let lines: Vec<Line> = functions.iter().map(Line::new).collect();
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &lines)?;
        writeln!(out)?;
    } else if lines.is_empty() {
        writeln!(out, "no network functions on this machine")?;
    } else {
        table(&lines, out)?;
    }
    Ok(Exit::Clean)
}

fn table(lines: &[Line], out: &mut dyn Write) -> Result<()> {
    let mut rows =
        vec![["ADDRESS", "ID", "DRIVER", "GROUP", "INTERFACES", "NAME"].map(str::to_owned)];
    rows.extend(lines.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    for row in &rows {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(widths) {
            text.push_str(&format!("{cell:width$}  "));
        }
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}

fn row(line: &Line) -> [String; 6] {
    let dash = || "-".to_owned();
    let group = line
        .iommu_group
        .map_or_else(dash, |group| match line.siblings {
            0 => group.to_string(),
            siblings => format!("{group} (+{siblings})"),
        });
    let interfaces = match line.interfaces.as_slice() {
        [] => dash(),
        names => names.join(","),
    };
    let name = match &line.physical_function {
        Some(address) => format!("{} (of {address})", line.name),
        None => line.name.clone(),
    };
    [
        line.address.clone(),
        line.id.clone(),
        line.driver.clone().unwrap_or_else(dash),
        group,
        interfaces,
        name,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Tree;

    #[test]
    fn table_has_a_line_for_each_function() {
        let tree = Tree::with_82576();
        let mut out = Vec::new();
        list(&ListArgs { json: false }, &tree.sysfs(), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "ADDRESS       ID         DRIVER  GROUP   INTERFACES  NAME\n\
             0000:01:00.0  8086:10c9  igb     6 (+1)  eth0        82576 Gigabit Network Connection\n"
        );
    }

    #[test]
    fn json_is_an_array_of_objects() {
        let tree = Tree::with_82576();
        let mut out = Vec::new();
        list(&ListArgs { json: true }, &tree.sysfs(), &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value[0]["address"], "0000:01:00.0");
        assert_eq!(value[0]["driver"], "igb");
        assert_eq!(value[0]["iommu_group"], 6);
        assert_eq!(value[0]["siblings"], 1);
    }

    #[test]
    fn machine_without_network_functions_says_so() {
        let tree = Tree::empty();
        let mut out = Vec::new();
        let exit = list(&ListArgs { json: false }, &tree.sysfs(), &mut out).unwrap();
        assert_eq!(exit, Exit::Clean);
        assert_eq!(out, b"no network functions on this machine\n");
    }
}
