//! Walking the two lists, with every bound checked.

use std::fmt;

use super::views::Space;
use super::{CapabilityError, extended_id, id};
use crate::config::{EXTENDED_SIZE, STANDARD_SIZE, offset};

/// One of the two capability lists of a function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum List {
    /// In the first 256 bytes, from the pointer at 0x34 (PCIe base specification 6.0, §7.5.1.1.11).
    Standard,
    /// From 0x100 on (§7.6.2).
    Extended,
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standard => "standard",
            Self::Extended => "extended",
        })
    }
}

/// One capability as its list shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The list that it is in.
    pub list: List,
    /// Its ID, in the numbering of its list.
    pub id: u16,
    /// Its version; 0 in the standard list, whose header has none.
    pub version: u8,
    /// Where it starts, in bytes.
    pub offset: u16,
    /// Bytes that it is known to take: at least its header.
    pub len: u16,
}

/// A capability's header: ID, version, offset of the next one.
struct Header {
    id: u16,
    version: u8,
    next: u16,
}

/// Appends the capabilities of `list` to `entries`.
pub(super) fn walk(
    space: &Space<'_>,
    list: List,
    entries: &mut Vec<Entry>,
) -> Result<(), CapabilityError> {
    let first = entries.len();
    // The end of the list's part of the space, in bytes.
    let (low, end, mut from, mut at) = match list {
        List::Standard => (
            0x40,
            STANDARD_SIZE,
            offset::CAPABILITIES,
            u16::from(space.u8(offset::CAPABILITIES)) & !3,
        ),
        List::Extended => (
            offset::EXTENDED_CAPABILITIES,
            space.len().min(EXTENDED_SIZE),
            offset::EXTENDED_CAPABILITIES,
            offset::EXTENDED_CAPABILITIES,
        ),
    };
    if list == List::Extended && (end == STANDARD_SIZE || is_empty(space)) {
        return Ok(());
    }
    let mut visited = [false; EXTENDED_SIZE / 4];
    while at != 0 {
        if at < low || usize::from(at) + 4 > end {
            return Err(CapabilityError::OutOfRange { list, from, to: at });
        }
        let seen = &mut visited[usize::from(at) / 4];
        if *seen {
            return Err(CapabilityError::Cyclic { list, from, to: at });
        }
        *seen = true;
        let header = header(space, list, at);
        let len = len(space, list, &header, at);
        if usize::from(at) + usize::from(len) > end {
            return Err(CapabilityError::Truncated {
                list,
                id: header.id,
                offset: at,
                needed: len,
            });
        }
        entries.push(Entry {
            list,
            id: header.id,
            version: header.version,
            offset: at,
            len,
        });
        (from, at) = (at, header.next);
    }
    refuse_overlap(list, &entries[first..])
}

/// No extended capability at all reads as zero; a function on a bus without extended
/// configuration space may answer all-ones there.
fn is_empty(space: &Space<'_>) -> bool {
    matches!(space.u32(offset::EXTENDED_CAPABILITIES), 0 | u32::MAX)
}

fn header(space: &Space<'_>, list: List, at: u16) -> Header {
    match list {
        List::Standard => Header {
            id: space.u8(at).into(),
            version: 0,
            next: u16::from(space.u8(at + 1)) & !3,
        },
        List::Extended => {
            let [id_low, id_high, version_and_next, next_high] = space.u32(at).to_le_bytes();
            Header {
                id: u16::from_le_bytes([id_low, id_high]),
                version: version_and_next & 0xf,
                next: u16::from_le_bytes([version_and_next, next_high]) >> 4 & !3,
            }
        }
    }
}

/// Bytes that a capability takes at the least, by its ID and by what it says of itself. Fields
/// past the end of the space read zero here; the caller then finds that the whole does not fit.
fn len(space: &Space<'_>, list: List, header: &Header, at: u16) -> u16 {
    match (list, header.id) {
        (List::Standard, id::POWER_MANAGEMENT | id::VITAL_PRODUCT_DATA) => 8,
        (List::Standard, id::MSI) => {
            let control = space.u16(at + 2);
            let address_64 = control & 1 << 7 != 0;
            let masks = control & 1 << 8 != 0;
            10 + if address_64 { 4 } else { 0 } + if masks { 10 } else { 0 }
        }
        (List::Standard, id::VENDOR) => u16::from(space.u8(at + 2)).max(3),
        // Version 1 endpoints end after Link Status; version 2 has the second set of registers.
        (List::Standard, id::PCI_EXPRESS) => match space.u16(at + 2) & 0xf {
            0 | 1 => 0x14,
            _ => 0x3c,
        },
        (List::Standard, id::MSI_X) => 12,
        (List::Standard, id::ADVANCED_FEATURES) => 6,
        (List::Standard, _) => 2,
        (List::Extended, extended_id::ADVANCED_ERRORS) => 0x2c,
        (List::Extended, extended_id::SERIAL_NUMBER) => 12,
        (List::Extended, extended_id::VENDOR) => {
            let [_, _, low, high] = space.u32(at + 4).to_le_bytes();
            (u16::from_le_bytes([low, high]) >> 4).max(8)
        }
        (List::Extended, extended_id::ARI | extended_id::ATS) => 8,
        (List::Extended, extended_id::SR_IOV) => 0x40,
        (List::Extended, _) => 4,
    }
}

fn refuse_overlap(list: List, entries: &[Entry]) -> Result<(), CapabilityError> {
    let mut sorted: Vec<&Entry> = entries.iter().collect();
    sorted.sort_by_key(|entry| entry.offset);
    for pair in sorted.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            return Err(CapabilityError::Overlap {
                list,
                first: pair[0].offset,
                second: pair[1].offset,
            });
        }
    }
    Ok(())
}
