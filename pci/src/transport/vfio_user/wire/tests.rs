use super::*;

const BAR: RegionInfo = RegionInfo {
    argsz: 0,
    flags: 0x7,
    index: 0,
    cap_offset: 0,
    size: 0x2_0000,
    offset: 0x1000,
};

fn region_info_with_areas() -> Vec<u8> {
    let areas = [
        SparseArea {
            offset: 0x4000,
            size: 0x1000,
        },
        SparseArea {
            offset: 0x8000,
            size: 0x2000,
        },
    ];
    encode_region_info(BAR, &areas, 4096)
}

#[test]
fn header_of_a_posted_write_has_the_bytes_of_the_specification() {
    let header = Header::command(0x1234, Command::RegionWrite, Flags::NO_REPLY, 20);
    let bytes = [0x34, 0x12, 10, 0, 36, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(header.as_bytes(), bytes);
}

#[test]
fn failure_has_reply_and_error_bits_and_no_payload() {
    let header = Header::command(7, Command::DeviceReset, Flags::empty(), 0).failure(16);
    let bytes = [7, 0, 13, 0, 16, 0, 0, 0, 0x21, 0, 0, 0, 16, 0, 0, 0];
    assert_eq!(header.as_bytes(), bytes);
}

#[test]
fn dma_map_has_the_bytes_of_the_specification() {
    let map = DmaMap {
        argsz: 32,
        flags: (DmaFlags::READ | DmaFlags::WRITE).bits(),
        offset: 0x1000,
        address: 0x1_0000_0000,
        size: 0x20_0000,
    };
    let bytes = [
        32, 0, 0, 0, 3, 0, 0, 0, //
        0, 0x10, 0, 0, 0, 0, 0, 0, //
        0, 0, 0, 0, 1, 0, 0, 0, //
        0, 0, 0x20, 0, 0, 0, 0, 0,
    ];
    assert_eq!(map.as_bytes(), bytes);
}

#[test]
fn region_access_has_offset_then_region_then_count() {
    let access = RegionAccess {
        offset: 0x1_0018,
        region: 2,
        count: 4,
    };
    let bytes = [0x18, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0];
    assert_eq!(access.as_bytes(), bytes);
}

#[test]
fn irq_set_has_twenty_bytes_in_the_order_of_linux_vfio_h() {
    let set = IrqSet {
        argsz: 20,
        flags: (IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER).bits(),
        index: 2,
        start: 1,
        count: 3,
    };
    let bytes = [
        20, 0, 0, 0, 0x24, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0,
    ];
    assert_eq!(set.as_bytes(), bytes);
}

#[test]
fn every_command_number_survives_the_round_trip() {
    let numbers: Vec<u16> = (0..=u16::MAX)
        .filter_map(Command::from_number)
        .map(Command::number)
        .collect();
    assert_eq!(numbers, (1..=13).collect::<Vec<u16>>());
}

#[test]
fn size_below_a_header_has_no_payload() {
    let mut header = Header::command(0, Command::Version, Flags::empty(), 0);
    header.size = 15;
    assert_eq!(header.payload(), None);
}

#[test]
fn version_round_trips() {
    let caps = Capabilities {
        max_msg_fds: 8,
        max_dma_maps: 16,
        ..Capabilities::default()
    };
    let version = Version { major: 0, minor: 1 };
    let payload = encode_version(version, &caps);
    assert_eq!(payload.last(), Some(&0));
    assert_eq!(parse_version(&payload), Ok((version, caps)));
}

#[test]
fn version_without_data_has_the_defaults() {
    let parsed = parse_version(&[0, 0, 1, 0]).unwrap();
    assert_eq!(parsed.1, Capabilities::default());
}

#[test]
fn version_data_of_a_newer_peer_is_read_without_what_is_unknown() {
    let mut payload = vec![0, 0, 1, 0];
    payload.extend_from_slice(
        b"{\"capabilities\":{\"max_msg_fds\":2,\"twin_socket\":{\"supported\":true}},\"x\":1}\0",
    );
    assert_eq!(parse_version(&payload).unwrap().1.max_msg_fds, 2);
}

#[test]
fn version_data_without_nul_is_malformed() {
    let parsed = parse_version(b"\0\0\x01\0{}");
    assert!(matches!(parsed, Err(Malformed::VersionData(_))));
}

#[test]
fn version_data_that_is_no_json_is_malformed() {
    let parsed = parse_version(b"\0\0\x01\0{\"capabilities\":\xff\0");
    assert!(matches!(parsed, Err(Malformed::VersionData(_))));
}

#[test]
fn version_data_with_a_negative_limit_is_malformed() {
    let parsed = parse_version(b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":-1}}\0");
    assert!(matches!(parsed, Err(Malformed::VersionData(_))));
}

#[test]
fn region_info_round_trips_with_its_areas() {
    let payload = region_info_with_areas();
    let (info, areas) = parse_region_info(&payload).unwrap();
    assert_eq!(info.argsz as usize, payload.len());
    assert_eq!(info.size, BAR.size);
    assert_eq!(areas.unwrap()[1].offset, 0x8000);
}

#[test]
fn region_info_leaves_out_areas_that_do_not_fit() {
    let payload = encode_region_info(
        BAR,
        &[SparseArea {
            offset: 0,
            size: 4096,
        }],
        32,
    );
    let (info, areas) = parse_region_info(&payload).unwrap();
    assert_eq!((payload.len(), info.argsz, areas), (32, 64, None));
}

#[test]
fn capability_that_points_at_itself_is_malformed() {
    let mut payload = region_info_with_areas();
    payload[36..40].copy_from_slice(&32u32.to_ne_bytes());
    let parsed = parse_region_info(&payload);
    assert!(matches!(
        parsed,
        Err(Malformed::CapabilityList { offset: 32, .. })
    ));
}

#[test]
fn capability_inside_the_region_info_is_malformed() {
    let mut payload = region_info_with_areas();
    payload[12..16].copy_from_slice(&8u32.to_ne_bytes());
    let parsed = parse_region_info(&payload);
    assert!(matches!(
        parsed,
        Err(Malformed::CapabilityList { offset: 8, .. })
    ));
}

#[test]
fn capability_beyond_the_payload_is_malformed() {
    let mut payload = region_info_with_areas();
    payload[12..16].copy_from_slice(&u32::MAX.to_ne_bytes());
    let parsed = parse_region_info(&payload);
    assert!(matches!(parsed, Err(Malformed::CapabilityList { .. })));
}

#[test]
fn area_count_beyond_the_payload_is_malformed() {
    let mut payload = region_info_with_areas();
    payload[40..44].copy_from_slice(&u32::MAX.to_ne_bytes());
    let parsed = parse_region_info(&payload);
    assert!(matches!(parsed, Err(Malformed::CapabilityList { .. })));
}

#[test]
fn truncated_structure_says_how_much_is_missing() {
    let parsed = exact::<DmaUnmap>("unmap reply", &[0; 23]);
    let short = Malformed::Short {
        what: "unmap reply",
        len: 23,
        needed: 24,
    };
    assert_eq!(parsed, Err(short));
}

#[test]
fn structure_with_bytes_too_many_is_refused() {
    assert!(exact::<DmaUnmap>("unmap reply", &[0; 25]).is_err());
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_the_parsers_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..256)) {
        let _ = parse_version(&bytes);
        let _ = parse_region_info(&bytes);
    }

    /// Random bytes seldom have a capability list; these do.
    #[test]
    fn no_capability_list_makes_the_parser_panic(
        at in 0usize..80,
        value in proptest::num::u32::ANY,
    ) {
        let mut payload = region_info_with_areas();
        let at = at.min(payload.len() - 4);
        payload[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        let _ = parse_region_info(&payload);
    }
}
