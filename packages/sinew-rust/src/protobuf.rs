//! An encoder and decoder for the part of Protobuf's wire format that the messages use
//! (<https://protobuf.dev/programming-guides/encoding>).

use crate::{Error, Result};

/// Encodes one message. The order of the calls is the order of the fields. proto3 omits numbers that are zero and texts
/// that are empty.
#[derive(Default)]
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    /// Write the start of a field with `size` bytes. The caller writes the bytes themselves.
    pub(crate) fn begin(&mut self, number: u32, size: usize) {
        self.varint(u64::from(number) << 3 | 2);
        self.varint(size as u64);
    }

    pub(crate) fn blob(&mut self, number: u32, data: &[u8]) {
        self.begin(number, data.len());
        self.bytes.extend_from_slice(data);
    }

    pub(crate) fn text(&mut self, number: u32, value: &str) {
        if !value.is_empty() {
            self.blob(number, value.as_bytes());
        }
    }

    pub(crate) fn integer(&mut self, number: u32, value: impl Into<u64>) {
        let value = value.into();
        if value != 0 {
            self.present(number, Some(value));
        }
    }

    /// Write an optional field, even if its value is 0.
    pub(crate) fn present(&mut self, number: u32, value: Option<u64>) {
        if let Some(value) = value {
            self.varint(u64::from(number) << 3);
            self.varint(value);
        }
    }

    pub(crate) fn double(&mut self, number: u32, value: Option<f64>) {
        if let Some(value) = value {
            self.varint(u64::from(number) << 3 | 1);
            self.bytes.extend_from_slice(&value.to_le_bytes());
        }
    }

    pub(crate) fn float(&mut self, number: u32, value: Option<f32>) {
        if let Some(value) = value {
            self.varint(u64::from(number) << 3 | 5);
            self.bytes.extend_from_slice(&value.to_le_bytes());
        }
    }

    pub(crate) fn floats(&mut self, number: u32, values: &[f32]) {
        if !values.is_empty() {
            self.begin(number, 4 * values.len());
            values.iter().for_each(|each| self.bytes.extend_from_slice(&each.to_le_bytes()));
        }
    }
}

/// An iterator over the fields of one message. An item is an error if the bytes are not a Protobuf message.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

/// One field of a message.
pub(crate) struct Field<'a> {
    pub(crate) number: u32,
    value: Value<'a>,
}

enum Value<'a> {
    Varint(u64),
    Fixed64([u8; 8]),
    Fixed32([u8; 4]),
    Bytes(&'a [u8]),
}

fn broken() -> Error {
    Error::BadReply("the reply: expected a PredictResponse, got other bytes".into())
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn take(&mut self, size: usize) -> Result<&'a [u8]> {
        if size > self.rest.len() {
            return Err(broken());
        }
        let (taken, rest) = self.rest.split_at(size);
        self.rest = rest;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| broken())
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for index in 0..10 {
            let [byte] = self.fixed()?;
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(broken())
    }

    fn field(&mut self) -> Result<Field<'a>> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => Value::Fixed64(self.fixed()?),
            2 => {
                let size = usize::try_from(self.varint()?).map_err(|_| broken())?;
                Value::Bytes(self.take(size)?)
            }
            5 => Value::Fixed32(self.fixed()?),
            _ => return Err(broken()),
        };
        Ok(Field { number: u32::try_from(tag >> 3).map_err(|_| broken())?, value })
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Result<Field<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

impl<'a> Field<'a> {
    pub(crate) fn integer(&self) -> Result<u64> {
        match self.value {
            Value::Varint(value) => Ok(value),
            _ => Err(self.other("an integer")),
        }
    }

    pub(crate) fn small(&self) -> Result<u32> {
        u32::try_from(self.integer()?).map_err(|_| self.other("an integer of 32 bits"))
    }

    pub(crate) fn float(&self) -> Result<f32> {
        match self.value {
            Value::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.other("a float")),
        }
    }

    pub(crate) fn double(&self) -> Result<f64> {
        match self.value {
            Value::Fixed64(bytes) => Ok(f64::from_le_bytes(bytes)),
            _ => Err(self.other("a double")),
        }
    }

    pub(crate) fn bytes(&self) -> Result<&'a [u8]> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(self.other("bytes")),
        }
    }

    pub(crate) fn text(&self) -> Result<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| self.other("text in UTF-8"))
    }

    /// Append the field's values to a vector. The field contains one float, or a block of several floats.
    pub(crate) fn append_to(&self, into: &mut Vec<f32>) -> Result<()> {
        let Value::Bytes(block) = self.value else {
            into.push(self.float()?);
            return Ok(());
        };
        let floats = block.chunks_exact(4);
        if !floats.remainder().is_empty() {
            return Err(self.other("floats of 4 bytes"));
        }
        into.extend(floats.map(|each| f32::from_le_bytes([each[0], each[1], each[2], each[3]])));
        Ok(())
    }

    fn other(&self, expected: &str) -> Error {
        Error::BadReply(format!("the reply, field {}: expected {expected}, got something else", self.number))
    }
}
