//! From bytes to structures, and back.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    CAP_SPARSE_MMAP, CapabilityHeader, DEFAULT_MAX_DATA, DEFAULT_MAX_DMA_MAPS, DEFAULT_MAX_FDS,
    DEFAULT_PAGE_SIZES, Header, MAX_VARIABLE, Malformed, RegionFlags, RegionInfo, SparseArea,
    SparseMmap, Version,
};

/// Reads the structure that a payload begins with, and returns what follows it.
///
/// `what` names the structure in the error.
///
/// # Errors
///
/// [`Malformed::Short`] when the payload ends before the structure does.
pub fn split<'a, T: FromBytes>(
    what: &'static str,
    payload: &'a [u8],
) -> Result<(T, &'a [u8]), Malformed> {
    T::read_from_prefix(payload).map_err(|_| Malformed::Short {
        what,
        len: payload.len(),
        needed: size_of::<T>(),
    })
}

/// Reads a payload that is one structure and nothing else.
///
/// # Errors
///
/// [`Malformed::Short`] when the payload has another length.
pub fn exact<T: FromBytes>(what: &'static str, payload: &[u8]) -> Result<T, Malformed> {
    T::read_from_bytes(payload).map_err(|_| Malformed::Short {
        what,
        len: payload.len(),
        needed: size_of::<T>(),
    })
}

/// A whole message in one piece, ready for one `send`: header, structure, data.
#[must_use]
pub fn encode(header: &Header, body: &[u8], data: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(Header::SIZE + body.len() + data.len());
    message.extend_from_slice(header.as_bytes());
    message.extend_from_slice(body);
    message.extend_from_slice(data);
    message
}

/// What a peer can do, as it says in its [`Command::Version`](super::Command::Version) message. What it leaves out has the
/// protocol's default; what this code does not know is ignored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Descriptors that it can receive in one message.
    pub max_msg_fds: u64,
    /// Bytes of data that it takes or gives in one access.
    pub max_data_xfer_size: u64,
    /// Mappings that can be live at once.
    pub max_dma_maps: u64,
    /// Page sizes that mappings may have, in bytes, or'ed together.
    pub pgsizes: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_msg_fds: DEFAULT_MAX_FDS,
            max_data_xfer_size: DEFAULT_MAX_DATA,
            max_dma_maps: DEFAULT_MAX_DMA_MAPS,
            pgsizes: DEFAULT_PAGE_SIZES,
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
struct VersionData {
    #[serde(default)]
    capabilities: Capabilities,
}

/// The payload of a version message or its reply: the numbers, then NUL-terminated JSON.
#[must_use]
pub fn encode_version(version: Version, capabilities: &Capabilities) -> Vec<u8> {
    let data = VersionData {
        capabilities: capabilities.clone(),
    };
    let mut payload = version.as_bytes().to_vec();
    // A structure of four numbers has no way to fail; without data the defaults hold.
    if serde_json::to_writer(&mut payload, &data).is_ok() {
        payload.push(0);
    } else {
        payload.truncate(size_of::<Version>());
    }
    payload
}

/// Reads the payload of a version message or its reply.
///
/// # Errors
///
/// [`Malformed`] when it is too short, too long, not NUL-terminated or not such JSON.
pub fn parse_version(payload: &[u8]) -> Result<(Version, Capabilities), Malformed> {
    let (version, data) = split::<Version>("version", payload)?;
    if data.is_empty() {
        return Ok((version, Capabilities::default()));
    }
    if data.len() > MAX_VARIABLE {
        return Err(Malformed::VersionData(format!("{} bytes", data.len())));
    }
    let json = data
        .strip_suffix(&[0])
        .ok_or_else(|| Malformed::VersionData("no NUL at the end".to_owned()))?;
    let data: VersionData =
        serde_json::from_slice(json).map_err(|e| Malformed::VersionData(e.to_string()))?;
    Ok((version, data.capabilities))
}

/// The payload of the reply to [`Command::DeviceGetRegionInfo`](super::Command::DeviceGetRegionInfo): the region, with a sparse mmap
/// capability if there are `areas`. `room` is the command's `argsz`: what does not fit there is
/// left out, and the reply's `argsz` says how much is needed.
#[must_use]
pub fn encode_region_info(mut info: RegionInfo, areas: &[SparseArea], room: u32) -> Vec<u8> {
    let fixed = size_of::<RegionInfo>();
    info.argsz = u32_or_max(fixed);
    info.cap_offset = 0;
    if areas.is_empty() {
        return info.as_bytes().to_vec();
    }
    let full = fixed + size_of::<CapabilityHeader>() + size_of::<SparseMmap>() + size_of_val(areas);
    info.argsz = u32_or_max(full);
    info.flags |= RegionFlags::CAPS.bits();
    // QEMU takes an offset outside the structure for broken, before it looks whether the list came.
    info.cap_offset = u32_or_max(fixed);
    if full > room as usize {
        return info.as_bytes().to_vec();
    }
    let capability = CapabilityHeader {
        id: CAP_SPARSE_MMAP,
        version: 1,
        next: 0,
    };
    let sparse = SparseMmap {
        nr_areas: u32_or_max(areas.len()),
        reserved: 0,
    };
    let mut payload = info.as_bytes().to_vec();
    payload.extend_from_slice(capability.as_bytes());
    payload.extend_from_slice(sparse.as_bytes());
    payload.extend_from_slice(areas.as_bytes());
    payload
}

/// Reads the payload of a reply to [`Command::DeviceGetRegionInfo`](super::Command::DeviceGetRegionInfo): the region and the areas of
/// its sparse mmap capability, in the order of the wire; none where it has no such capability, or
/// where the capabilities were left out for want of room. Areas are not checked against the region.
///
/// # Errors
///
/// [`Malformed`] when the payload is too short, or the capability list leaves it or turns back.
pub fn parse_region_info(
    payload: &[u8],
) -> Result<(RegionInfo, Option<Vec<SparseArea>>), Malformed> {
    let (info, rest) = split::<RegionInfo>("region info", payload)?;
    if info.flags & RegionFlags::CAPS.bits() == 0 || rest.is_empty() {
        return Ok((info, None));
    }
    let mut areas = None;
    let mut end_of_previous = size_of::<RegionInfo>();
    let mut next = info.cap_offset as usize;
    while next != 0 {
        let broken = Malformed::CapabilityList {
            region: info.index,
            offset: next as u64,
        };
        // A list that only moves forward ends.
        if next < end_of_previous {
            return Err(broken);
        }
        let at = payload.get(next..).ok_or_else(|| broken.clone())?;
        let (head, body) =
            split::<CapabilityHeader>("capability", at).map_err(|_| broken.clone())?;
        end_of_previous = next + size_of::<CapabilityHeader>();
        if head.id == CAP_SPARSE_MMAP {
            areas = Some(parse_sparse(body).ok_or(broken)?);
        }
        next = head.next as usize;
    }
    Ok((info, areas))
}

fn parse_sparse(body: &[u8]) -> Option<Vec<SparseArea>> {
    let (sparse, rest) = SparseMmap::read_from_prefix(body).ok()?;
    let len = (sparse.nr_areas as usize).checked_mul(size_of::<SparseArea>())?;
    rest.get(..len)?
        .chunks_exact(size_of::<SparseArea>())
        .map(|area| SparseArea::read_from_bytes(area).ok())
        .collect()
}

fn u32_or_max(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
