//! The NVM behind EERD: what a driver reads of it. §6.

/// Words that EECD's size field announces: 1024.
const WORDS: usize = 1024;
/// The first 64 words sum to this, the last of them making it so.
const CHECKSUM: u16 = 0xBABA;
const CHECKSUM_WORD: usize = 0x3F;

/// Words of 16 bits.
#[derive(Debug)]
pub(super) struct Nvm {
    words: Vec<u16>,
}

impl Nvm {
    /// An NVM that gives the function this MAC address.
    #[must_use]
    pub(super) fn new(mac: [u8; 6]) -> Self {
        let mut words = vec![0xFFFF; WORDS];
        words[..=CHECKSUM_WORD].fill(0);
        for (word, pair) in words.iter_mut().zip(mac.chunks_exact(2)) {
            *word = u16::from_le_bytes([pair[0], pair[1]]);
        }
        words[0x05] = 0x1000; // image version 1.0.0
        words[0x08] = 0xFFFF; // no part number
        words[0x09] = 0xFFFF;
        words[0x0A] = 0x4000; // initialisation control 1
        words[0x0B] = 0xA03C; // subsystem
        words[0x0C] = failstop::igb::VENDOR;
        words[0x0D] = 0x10C9; // device id
        words[0x37] = 0xFFFF; // no alternate MAC address
        let sum = words[..CHECKSUM_WORD]
            .iter()
            .fold(0u16, |sum, word| sum.wrapping_add(*word));
        words[CHECKSUM_WORD] = CHECKSUM.wrapping_sub(sum);
        Self { words }
    }

    /// The word at `address`; all-ones beyond the end.
    #[must_use]
    pub(super) fn word(&self, address: u16) -> u16 {
        self.words
            .get(usize::from(address))
            .copied()
            .unwrap_or(0xFFFF)
    }

    /// The MAC address in words 0 to 2.
    #[must_use]
    pub(super) fn mac(&self) -> [u8; 6] {
        let [a, b, c] = [self.words[0], self.words[1], self.words[2]].map(u16::to_le_bytes);
        [a[0], a[1], b[0], b[1], c[0], c[1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x02, 0xAB, 0xCD, 0x01, 0x02, 0x03];

    #[test]
    fn the_first_64_words_sum_to_baba() {
        let nvm = Nvm::new(MAC);
        let sum = (0..64).fold(0u16, |sum, at| sum.wrapping_add(nvm.word(at)));
        assert_eq!(sum, 0xBABA);
    }

    #[test]
    fn the_mac_is_little_endian_in_words_0_to_2() {
        let nvm = Nvm::new(MAC);
        assert_eq!(
            [nvm.word(0), nvm.word(1), nvm.word(2)],
            [0xAB02, 0x01CD, 0x0302]
        );
        assert_eq!(nvm.mac(), MAC);
    }

    #[test]
    fn a_word_beyond_the_end_reads_all_ones() {
        assert_eq!(Nvm::new(MAC).word(0x3FFF), 0xFFFF);
    }
}
