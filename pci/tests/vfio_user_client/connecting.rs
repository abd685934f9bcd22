//! Servers that are not there, are something else, or describe impossible devices.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use failstop_pci::transport::vfio_user::wire::{
    self, Capabilities, Command, DeviceFlags, RegionFlags, RegionInfo, SparseArea, Version,
};
use failstop_pci::transport::vfio_user::{Broken, Client, ConnectError, Options, Violation};
use failstop_pci::transport::{RegionIndex, Transport};

use crate::support::{BAR, Peer, impatient, memory_file as file, opening, patient};

/// Opens a device whose server answers the version as `answer` says, and then waits.
fn version(options: Options, answer: impl FnOnce(&mut Peer) + Send + 'static) -> ConnectError {
    let (client, server) = opening(options, |mut peer| {
        answer(&mut peer);
        peer.receive();
    });
    let error = client.unwrap_err();
    server.join();
    error
}

fn version_payload(payload: Vec<u8>) -> ConnectError {
    version(patient(), move |peer| {
        let asked = peer.expect(Command::Version);
        peer.reply(&asked, &payload);
    })
}

/// Opens a device whose BAR 0 is described by `info`, with whatever follows it, and `file`.
fn bar(
    info: impl FnOnce(RegionInfo) -> Vec<u8> + Send + 'static,
    files: Vec<File>,
) -> Result<std::sync::Arc<Client>, ConnectError> {
    let (client, _server) = opening(patient(), move |peer| {
        peer.answer_version(&Capabilities::default());
        peer.answer_device_info(DeviceFlags::PCI);
        let asked = peer.expect(Command::DeviceGetRegionInfo);
        let mut region: RegionInfo = asked.body();
        region.size = BAR;
        region.flags = (RegionFlags::READ | RegionFlags::MMAP).bits();
        region.offset = 0x1000;
        let payload = info(region);
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        peer.send(&asked.header.reply(payload.len()), &payload, &fds);
        for _ in 1..8 {
            let Some(asked) = peer.receive() else { return };
            peer.answer_region(&asked);
        }
        for _ in 0..5 {
            let Some(asked) = peer.receive() else { return };
            peer.reply(&asked, &asked.payload);
        }
        peer.receive();
    });
    client
}

fn with_areas(info: RegionInfo, areas: &[(u64, u64)]) -> Vec<u8> {
    let areas: Vec<SparseArea> = areas
        .iter()
        .map(|&(offset, size)| SparseArea { offset, size })
        .collect();
    wire::encode_region_info(info, &areas, 4096)
}

fn words(error: &ConnectError) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        words += ": ";
        words += &cause.to_string();
        source = cause.source();
    }
    words
}

#[test]
fn path_without_a_socket_is_named() {
    let error = Client::connect("/nonexistent/nic.sock", patient()).unwrap_err();
    assert!(matches!(error, ConnectError::NoSocket { .. }));
    assert!(error.to_string().contains("/nonexistent/nic.sock"));
}

#[test]
fn plain_file_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Client::connect(file.path(), patient()).unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }));
}

#[test]
fn socket_of_a_server_that_ended_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let error = Client::connect(&path, patient()).unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }));
}

#[test]
fn path_too_long_for_a_socket_is_an_error() {
    let error = Client::connect("/".repeat(200), patient()).unwrap_err();
    assert!(matches!(error, ConnectError::Socket { .. }));
}

#[test]
fn descriptor_that_is_no_socket_is_an_error() {
    let file = file(0).into();
    let error = Client::from_socket(file, "passed", patient()).unwrap_err();
    assert!(matches!(error, ConnectError::Socket { .. }));
}

#[test]
fn server_that_accepts_nobody_is_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Client::connect(&path, impatient()).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }));
}

#[test]
fn server_that_says_nothing_is_no_answer() {
    let error = version(impatient(), |peer| {
        peer.expect(Command::Version);
    });
    assert!(matches!(error, ConnectError::NoAnswer { .. }));
}

#[test]
fn server_that_hangs_up_at_once_is_told_apart() {
    let (client, _server) = opening(patient(), drop);
    assert!(matches!(client.unwrap_err(), ConnectError::HungUp { .. }));
}

#[test]
fn server_that_refuses_the_version_is_quoted() {
    let error = version(patient(), |peer| {
        let asked = peer.expect(Command::Version);
        peer.fail(&asked, 93);
    });
    assert!(matches!(
        error,
        ConnectError::VersionRefused { errno: 93, .. }
    ));
}

#[test]
fn other_protocol_is_not_vfio_user() {
    let error = version(patient(), |peer| {
        peer.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    assert!(matches!(error, ConnectError::NotVfioUser { .. }));
}

#[test]
fn other_major_version_is_an_error() {
    let version = Version { major: 1, minor: 0 };
    let error = version_payload(wire::encode_version(version, &Capabilities::default()));
    assert!(matches!(error, ConnectError::Version { major: 1, .. }));
}

#[test]
fn minor_version_beyond_ours_is_an_error() {
    let version = Version { major: 0, minor: 2 };
    let error = version_payload(wire::encode_version(version, &Capabilities::default()));
    assert!(matches!(error, ConnectError::Version { minor: 2, .. }));
}

#[test]
fn garbage_version_json_is_not_vfio_user() {
    let error = version_payload(b"\0\0\x01\0{\"capabilities\":[[[[\0".to_vec());
    assert!(matches!(error, ConnectError::NotVfioUser { .. }));
    assert!(words(&error).contains("version data"), "{}", words(&error));
}

#[test]
fn deeply_nested_version_json_is_not_vfio_user() {
    let mut payload = b"\0\0\x01\0".to_vec();
    payload.extend_from_slice(&[b'['; 50_000]);
    payload.push(0);
    let error = version_payload(payload);
    assert!(matches!(error, ConnectError::NotVfioUser { .. }));
}

#[test]
fn server_that_transfers_no_register_at_once_is_refused() {
    let caps = Capabilities {
        max_data_xfer_size: 0,
        ..Capabilities::default()
    };
    let version = Version { major: 0, minor: 1 };
    let error = version_payload(wire::encode_version(version, &caps));
    assert!(words(&error).contains("max_data_xfer_size"));
}

#[test]
fn device_that_is_no_pci_function_is_refused() {
    let (client, server) = opening(patient(), |peer| {
        peer.answer_version(&Capabilities::default());
        peer.answer_device_info(DeviceFlags::RESET);
        peer.expect_hang_up();
    });
    assert!(matches!(client.unwrap_err(), ConnectError::NotPci { .. }));
    server.join();
}

#[test]
fn region_larger_than_any_file_offset_is_impossible() {
    let error = bar(
        |mut info| {
            info.size = u64::MAX;
            wire::encode_region_info(info, &[], 32)
        },
        vec![],
    )
    .unwrap_err();
    assert!(words(&error).contains("size of region 0"));
}

#[test]
fn region_that_overflows_its_file_offset_is_impossible() {
    let error = bar(
        |mut info| {
            info.offset = i64::MAX as u64 - 0xfff;
            wire::encode_region_info(info, &[], 32)
        },
        vec![file(1 << 20)],
    )
    .unwrap_err();
    assert!(words(&error).contains("file offset of region 0"));
}

#[test]
fn cyclic_capability_list_is_malformed() {
    let error = bar(
        |info| {
            let mut payload = with_areas(info, &[(0, 0x1000)]);
            payload[36..40].copy_from_slice(&32u32.to_ne_bytes());
            payload
        },
        vec![file(1 << 20)],
    )
    .unwrap_err();
    assert!(words(&error).contains("capability list of region 0"));
}

#[test]
fn area_beyond_its_region_is_impossible() {
    let error = bar(
        |info| with_areas(info, &[(0x1_f000, 0x2000)]),
        vec![file(1 << 20)],
    )
    .unwrap_err();
    assert!(words(&error).contains("mappable area's size"));
}

#[test]
fn area_that_overflows_is_impossible() {
    let error = bar(
        |info| with_areas(info, &[(u64::MAX - 0xfff, 0x2000)]),
        vec![file(1 << 20)],
    )
    .unwrap_err();
    assert!(words(&error).contains("mappable area's size"));
}

#[test]
fn areas_that_overlap_are_impossible() {
    let error = bar(
        |info| with_areas(info, &[(0x1000, 0x2000), (0x2000, 0x1000)]),
        vec![file(1 << 20)],
    )
    .unwrap_err();
    assert!(words(&error).contains("mappable area's offset"));
}

#[test]
fn areas_are_cut_to_whole_pages_and_sorted() {
    let areas = [(0x8000, 0x1800), (0x800, 0x2000), (0x4100, 0x80)];
    let client = bar(move |info| with_areas(info, &areas), vec![file(1 << 20)]).unwrap();
    assert_eq!(
        client.region(RegionIndex::Bar(0)).mappable,
        [(0x1000, 0x1000), (0x8000, 0x1000)]
    );
}

#[test]
fn region_without_areas_is_mappable_as_a_whole() {
    let info = |info| wire::encode_region_info(info, &[], 32);
    let client = bar(info, vec![file(1 << 20)]).unwrap();
    assert_eq!(client.region(RegionIndex::Bar(0)).mappable, [(0, BAR)]);
}

#[test]
fn region_that_is_mappable_without_a_file_is_not_mappable() {
    let client = bar(|info| wire::encode_region_info(info, &[], 32), vec![]).unwrap();
    assert!(client.region(RegionIndex::Bar(0)).mappable.is_empty());
}

/// A file system in user space, which may be the server's own, gives a page when it likes: a register
/// read of a mapped one would have no deadline. One that the kernel makes up stands for it.
#[test]
fn region_whose_file_is_no_memory_is_accessed_by_messages() {
    let served = File::open("/proc/version").unwrap();
    let pipe = File::from(nix::unistd::pipe().unwrap().0);
    for file in [served, pipe] {
        let client = bar(|info| wire::encode_region_info(info, &[], 32), vec![file]).unwrap();
        assert!(client.region(RegionIndex::Bar(0)).mappable.is_empty());
        assert!(client.region_file(RegionIndex::Bar(0), 0).is_err());
    }
}

#[test]
fn region_whose_file_is_too_short_is_impossible() {
    let info = |info| wire::encode_region_info(info, &[], 32);
    let error = bar(info, vec![file(0x1000 + BAR - 1)]).unwrap_err();
    let text = words(&error);
    assert!(text.contains("is shorter than the server said"), "{text}");
}

#[test]
fn file_for_a_region_that_is_not_mappable_is_a_violation() {
    let info = |mut info: RegionInfo| {
        info.flags = RegionFlags::READ.bits();
        wire::encode_region_info(info, &[], 32)
    };
    let error = bar(info, vec![file(1 << 20)]).unwrap_err();
    assert!(words(&error).contains("brings 1 descriptors"));
}

/// libvfio-user sends the same file once for each area.
#[test]
fn same_file_for_each_area_is_taken_once() {
    let one = file(1 << 20);
    let two = one.try_clone().unwrap();
    let areas = [(0, 0x1000), (0x2000, 0x1000)];
    let client = bar(move |info| with_areas(info, &areas), vec![one, two]).unwrap();
    assert!(client.region_file(RegionIndex::Bar(0), 0x2000).is_ok());
}

#[test]
fn different_files_for_one_region_are_a_violation() {
    let areas = [(0, 0x1000), (0x2000, 0x1000)];
    let files = vec![file(1 << 20), file(1 << 20)];
    let error = bar(move |info| with_areas(info, &areas), files).unwrap_err();
    assert!(words(&error).contains("brings 2 descriptors"));
}

#[test]
fn too_many_descriptors_are_a_violation() {
    let files = (0..17).map(|_| file(1 << 20)).collect();
    let error = bar(|info| with_areas(info, &[(0, 0x1000)]), files).unwrap_err();
    assert!(words(&error).contains("brings 17 descriptors"));
}

#[test]
fn capabilities_that_are_withheld_make_nothing_mappable() {
    let info = |info| {
        wire::encode_region_info(
            info,
            &[SparseArea {
                offset: 0,
                size: 0x1000,
            }],
            32,
        )
    };
    let error = bar(info, vec![file(1 << 20)]).unwrap_err();
    assert!(words(&error).contains("capability size of region 0"));
}

#[test]
fn region_of_another_index_is_the_wrong_subject() {
    let info = |mut info: RegionInfo| {
        info.index = 3;
        wire::encode_region_info(info, &[], 32)
    };
    let error = bar(info, vec![]).unwrap_err();
    assert!(words(&error).contains("is about index 0x3"));
}

#[test]
fn violation_at_the_opening_ends_the_connection() {
    let (client, server) = opening(patient(), |peer| {
        let asked = peer.expect(Command::Version);
        peer.reply(&asked, &[0]);
        peer.expect_hang_up();
    });
    let ConnectError::NotVfioUser { source, .. } = client.unwrap_err() else {
        panic!("another error");
    };
    assert!(matches!(
        source,
        Broken::Protocol(Violation::WrongSize { .. })
    ));
    server.join();
}
