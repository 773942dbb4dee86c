//! Functions that encode requests and decode replies. They use no sockets.

use std::borrow::Cow;

use crate::protobuf::{Field, Reader, Writer};
use crate::schema::{count, image, image_encoding, report as run, timing, window as node};
use crate::schema::{predict_request as asked, predict_request_kind as kind, predict_response as told};
use crate::{Chunk, Error, Image, Observation, Options, Pixels, Report, Result, Timing, Window};

const MAX_DIM: usize = 1024;
/// The limit of warnings in a reply. An empty warning has 3 bytes in the message but 24 bytes in memory.
const MAX_WARNINGS: usize = 1024;
const MOST_TOGETHER: usize = 64; // the limit of observations in one message

fn refuse<T>(field: impl AsRef<str>, expected: &str, got: impl std::fmt::Display) -> Result<T> {
    Err(Error::BadObservation(format!("{}: expected {expected}, got {got}", field.as_ref())))
}

fn wrong<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::BadReply(text.into()))
}

fn unsafe_chunk<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::UnsafeChunk(text.into()))
}

/// Encode a request for one chunk. `policy` is the name of one of the server's policies, or "" for the first policy.
///
/// # Errors
/// [`Error::BadObservation`] with the name of the field.
pub fn encode_infer(seen: &Observation<'_>, request_id: u64, api_key: &str, policy: &str) -> Result<Vec<u8>> {
    if seen.images.is_empty() {
        return refuse("images", "a frame of each camera", "none");
    }
    encode(seen, request_id, api_key, policy, None)
}

/// The fields of a stream's sample that an observation does not have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pace {
    /// Nodes of the trajectory per second.
    pub rate: f32,
    /// The time when the cameras captured the frames, in seconds of the robot's clock. If absent, the sample's `time`.
    pub frame_time: Option<f64>,
    /// How an ordinary checkpoint's actions become nodes: "", `linear` or `hold`.
    pub interpolation: String,
}

/// Encode a stream's sample, with or without frames.
///
/// # Errors
/// [`Error::BadObservation`] with the name of the field.
pub fn encode_sample(
    sample: &Observation<'_>,
    pace: &Pace,
    request_id: u64,
    api_key: &str,
    policy: &str,
) -> Result<Vec<u8>> {
    if sample.time.is_none() {
        return refuse("time", "seconds of the robot's clock", "none");
    }
    encode(sample, request_id, api_key, policy, Some(pace))
}

/// Encode the message that ends a session's stream.
pub fn encode_end(session: &str, api_key: &str) -> Vec<u8> {
    let mut out = Writer::default();
    out.integer(asked::KIND, kind::STREAM_END);
    out.text(asked::SESSION, session);
    out.text(asked::API_KEY, api_key);
    out.bytes
}

fn encode(
    seen: &Observation<'_>,
    request_id: u64,
    api_key: &str,
    policy: &str,
    pace: Option<&Pace>,
) -> Result<Vec<u8>> {
    let pixels: usize = seen.images.iter().map(|each| size_of(each) + 64).sum();
    let mut out = Writer::default();
    if !seen.tokens.is_empty() {
        let mut packed = Writer::default();
        seen.tokens.iter().for_each(|&token| packed.varint(i64::from(token) as u64));
        out.blob(asked::LANG_TOKENS, &packed.bytes);
    }
    out.floats(asked::NOISE, &seen.noise);
    out.integer(asked::REQUEST_ID, request_id);
    out.integer(asked::SUBTASK, seen.subtask);
    out.text(asked::QUESTION, &seen.question);
    out.integer(asked::TEXT_ONLY, seen.text_only);
    if let Some(advantage) = &seen.advantage {
        out.blob(asked::ADVANTAGE, advantage.as_bytes());
    }
    out.double(asked::GUIDANCE_SCALE, seen.guidance_scale);
    out.integer(asked::KIND, pace.map_or(kind::INFER, |_| kind::STREAM));
    out.text(asked::PROMPT, &seen.prompt);
    for frame in &seen.images {
        check_frame(frame)?;
        out.blob(asked::CAMERA_NAMES, frame.camera.as_bytes());
    }
    out.floats(asked::RAW_STATE, &seen.state);
    out.text(asked::SESSION, &seen.session);
    out.present(asked::SEED, seen.seed);
    out.present(asked::SOLVER_STEPS, seen.solver_steps.map(u64::from));
    out.double(asked::TIME, seen.time);
    out.float(asked::DEADLINE_MS, seen.deadline_ms);
    out.text(asked::API_KEY, api_key);
    out.floats(asked::PREVIOUS, &seen.previous);
    out.present(asked::DELAY, seen.delay.or(pace.map(|_| 1)).map(u64::from));
    out.present(asked::HORIZON, seen.horizon.map(u64::from));
    out.text(asked::RTC, &seen.rtc);
    out.text(asked::SCHEDULE, &seen.schedule);
    out.float(asked::BETA, seen.beta);
    if let Some(pace) = pace {
        out.float(asked::RATE, Some(pace.rate));
        out.double(asked::FRAME_TIME, pace.frame_time.or(seen.time).filter(|_| !seen.images.is_empty()));
        out.text(asked::INTERPOLATION, &pace.interpolation);
    }
    out.text(asked::POLICY, policy);
    out.integer(asked::TEXT_TOKENS, seen.text_tokens);
    out.text(asked::ADAPTER, &seen.adapter);
    out.bytes.reserve(pixels);
    for frame in &seen.images {
        let mut before = Writer::default(); // the Image message without its data, so the pixels are copied only once
        let shape = match frame.pixels {
            Pixels::Rgb { height, width, .. } => Some((image_encoding::RGB_U8, height, width)),
            Pixels::Float { height, width, .. } => Some((image_encoding::F32_RGB_01, height, width)),
            Pixels::File(_) => None,
        };
        if let Some((encoding, height, width)) = shape {
            before.integer(image::ENCODING, encoding);
            before.integer(image::HEIGHT, height);
            before.integer(image::WIDTH, width);
        }
        let data = data_of(frame);
        before.begin(image::DATA, data.len());
        out.begin(asked::IMAGES, before.bytes.len() + data.len());
        out.bytes.extend_from_slice(&before.bytes);
        out.bytes.extend_from_slice(&data);
    }
    Ok(out.bytes)
}

fn data_of<'a>(frame: &Image<'a>) -> Cow<'a, [u8]> {
    match frame.pixels {
        Pixels::Rgb { data, .. } | Pixels::File(data) => Cow::Borrowed(data),
        Pixels::Float { data, .. } => data.iter().flat_map(|number| number.to_le_bytes()).collect(),
    }
}

/// Return the number of bytes of a frame in the message.
fn size_of(frame: &Image<'_>) -> usize {
    match frame.pixels {
        Pixels::Rgb { data, .. } | Pixels::File(data) => data.len(),
        Pixels::Float { data, .. } => 4 * data.len(),
    }
}

fn check_frame(frame: &Image<'_>) -> Result<()> {
    let field = format!("images.{}", frame.camera);
    let (count, height, width, what) = match frame.pixels {
        Pixels::Rgb { data, height, width } => (data.len(), height, width, "bytes"),
        Pixels::Float { data, height, width } => {
            // The range contains no NaN, so this search also finds NaN.
            if let Some(wrong) = data.iter().find(|number| !(0.0..=1.0).contains(*number)) {
                return refuse(field, "numbers from 0 to 1", wrong);
            }
            (data.len(), height, width, "numbers")
        }
        Pixels::File([]) => return refuse(field, "a JPEG or PNG file", "no bytes"),
        Pixels::File(_) => return Ok(()),
    };
    let wanted = u64::from(height).checked_mul(u64::from(width)).and_then(|count| count.checked_mul(3));
    if count == 0 || wanted != Some(count as u64) {
        return refuse(field, &format!("{height} * {width} * 3 {what}"), count);
    }
    Ok(())
}

/// Encode one request with 1 to 64 observations. The server computes a chunk for each observation.
///
/// # Errors
/// [`Error::BadObservation`] with the index of the observation and the name of the field.
pub fn encode_infer_all(
    seen: &[Observation<'_>],
    request_id: u64,
    deadline_ms: Option<f32>,
    api_key: &str,
    policy: &str,
) -> Result<Vec<u8>> {
    if seen.is_empty() || seen.len() > MOST_TOGETHER {
        return refuse("observations", &format!("1 to {MOST_TOGETHER}"), seen.len());
    }
    let mut out = Writer::default();
    out.integer(asked::REQUEST_ID, request_id);
    out.float(asked::DEADLINE_MS, deadline_ms);
    out.text(asked::API_KEY, api_key);
    out.text(asked::POLICY, policy);
    for (index, each) in seen.iter().enumerate() {
        if each.deadline_ms.is_some() {
            let field = format!("observations[{index}].deadline_ms");
            return refuse(field, "none, of one of several observations", "one");
        }
        let inner = encode_infer(each, 0, "", "").map_err(|error| match error {
            Error::BadObservation(text) => Error::BadObservation(format!("observations[{index}].{text}")),
            other => other,
        })?;
        out.blob(asked::OBSERVATIONS, &inner);
    }
    Ok(out.bytes)
}

/// The requests without an observation.
#[derive(Debug, Clone, Copy)]
pub enum Control<'a> {
    /// Read the description of the server and of its policy's inputs and outputs.
    Metadata,
    /// Read the server's status and counters.
    Health,
    /// Start a new episode.
    Reset,
    /// Send a report of the robot's run.
    Report(&'a Report),
}

/// Encode a request without an observation.
pub fn encode_control(kind: Control<'_>, request_id: u64, session: &str, api_key: &str, policy: &str) -> Vec<u8> {
    let mut out = Writer::default();
    out.integer(asked::REQUEST_ID, request_id);
    let number = match kind {
        Control::Metadata => kind::METADATA,
        Control::Health => kind::HEALTH,
        Control::Reset => kind::RESET,
        Control::Report(_) => kind::REPORT,
    };
    out.integer(asked::KIND, number);
    out.text(asked::SESSION, session);
    out.text(asked::API_KEY, api_key);
    out.text(asked::POLICY, policy);
    if let Control::Report(report) = kind {
        out.blob(asked::REPORT, &encode_report(report));
    }
    out.bytes
}

fn encode_report(said: &Report) -> Vec<u8> {
    let mut out = Writer::default();
    let real = |value: f64| (value.to_bits() != 0).then_some(value);
    let counts = |out: &mut Writer, number: u32, named: &[(String, u64)]| {
        for (name, value) in named {
            let mut inner = Writer::default();
            inner.text(count::NAME, name);
            inner.integer(count::COUNT, *value);
            out.blob(number, &inner.bytes);
        }
    };
    out.integer(run::RUN, said.run);
    out.text(run::NAME, &said.name);
    out.text(run::STATE, &said.state);
    out.text(run::REASON, &said.reason);
    out.double(run::HZ, real(said.hz));
    out.double(run::RATE_HZ, real(said.rate_hz));
    out.double(run::ROWS_HZ, real(said.rows_hz));
    out.double(run::AGE_P50_MS, said.age_p50_ms);
    out.double(run::AGE_P95_MS, said.age_p95_ms);
    out.integer(run::STEPS, said.steps);
    out.integer(run::LATE, said.late);
    out.integer(run::SKIPPED, said.skipped);
    counts(&mut out, run::HELD, &said.held);
    out.integer(run::CLIPPED_COMMANDS, said.clipped_commands);
    counts(&mut out, run::CLIPPED, &said.clipped);
    said.limits.iter().for_each(|each| out.blob(run::LIMITS, each.as_bytes()));
    out.integer(run::FAILED_REQUESTS, said.failed_requests);
    out.integer(run::TAKEOVERS, said.takeovers);
    out.integer(run::STEPS_BY_HAND, said.steps_by_hand);
    out.present(run::EPISODES, said.episodes);
    out.present(run::SUCCESSES, said.successes);
    out.floats(run::ARM, &said.arm);
    out.bytes
}

#[derive(Default)]
struct Reply<'a> {
    request_id: u64,
    error: String,
    error_code: String,
    metadata: String,
    chunk: Chunk,
    window: Option<Window>,
    answers: Vec<&'a [u8]>,
}

impl<'a> Reply<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self> {
        let mut found = Self::default();
        let chunk = &mut found.chunk;
        chunk.timing.batch = 1; // an old server does not send this field
        for field in Reader::new(bytes) {
            let field = field?;
            match field.number {
                told::REQUEST_ID => found.request_id = field.integer()?,
                told::ERROR => found.error = field.text()?,
                told::ERROR_CODE => found.error_code = field.text()?,
                told::METADATA => found.metadata = field.text()?,
                told::ACTIONS => field.append_to(&mut chunk.actions)?,
                told::HORIZON => chunk.rows = field.small()? as usize,
                told::DIM => chunk.dim = field.small()? as usize,
                told::TIMING => read_timing(&field, &mut chunk.timing)?,
                told::SEED => chunk.seed = Some(field.integer()?),
                told::SESSION => chunk.session = field.text()?,
                told::TIME => chunk.time = Some(field.double()?),
                told::WARNINGS if chunk.warnings.len() == MAX_WARNINGS => {
                    return wrong(format!("warnings: expected at most {MAX_WARNINGS}, got more"));
                }
                told::WARNINGS => chunk.warnings.push(field.text()?),
                told::TEXT => chunk.text = field.text()?,
                told::ADAPTER => chunk.adapter = field.text()?,
                told::WINDOW => found.window = Some(read_window(&field)?),
                told::ANSWERS if found.answers.len() == MOST_TOGETHER => {
                    return wrong(format!("answers: expected at most {MOST_TOGETHER}, got more"));
                }
                told::ANSWERS => found.answers.push(field.bytes()?),
                _ => {}
            }
        }
        if found.error.is_empty() && found.error_code.is_empty() {
            return Ok(found);
        }
        let code = if found.error_code.is_empty() { "unknown".into() } else { plain(&found.error_code) };
        Err(Error::Server { code, message: plain(&found.error) })
    }

    fn of(bytes: &'a [u8], request_id: u64) -> Result<Self> {
        let found = Self::read(bytes)?;
        if found.request_id != request_id {
            return wrong(format!("request_id: expected {request_id}, got {}", found.request_id));
        }
        Ok(found)
    }
}

fn read_timing(message: &Field<'_>, into: &mut Timing) -> Result<()> {
    for field in Reader::new(message.bytes()?) {
        let field = field?;
        match field.number {
            timing::PREPROCESS_MS => into.preprocess_ms = field.float()?,
            timing::VISION_MS => into.vision_ms = field.float()?,
            timing::PREFIX_MS => into.prefix_ms = field.float()?,
            timing::STEP_MS => field.append_to(&mut into.step_ms)?,
            timing::POSTPROCESS_MS => into.postprocess_ms = field.float()?,
            timing::TOTAL_MS => into.total_ms = field.float()?,
            timing::QUEUE_MS => into.queue_ms = field.float()?,
            timing::SERVER_MS => into.server_ms = field.float()?,
            timing::BATCH => into.batch = field.small()?.max(1),
            timing::TEXT_MS => into.text_ms = field.float()?,
            timing::REUSED_VIEWS => into.reused_views = field.small()?,
            timing::REUSED_PREFIX => into.reused_prefix = field.integer()? != 0,
            _ => {}
        }
    }
    Ok(())
}

fn read_window(message: &Field<'_>) -> Result<Window> {
    let mut made = Window::default();
    for field in Reader::new(message.bytes()?) {
        let field = field?;
        match field.number {
            node::STEP => made.step = field.integer()? as i64,
            node::SAMPLE_TIME => made.sample_time = field.double()?,
            node::FRAME_TIME => made.frame_time = field.double()?,
            node::PREFIX_AGE_MS => made.prefix_age_ms = field.float()?,
            node::SENSOR_AGE_MS => made.sensor_age_ms = field.float()?,
            node::HEAD_MS => made.head_ms = field.float()?,
            node::RUN => made.run = field.integer()?,
            node::LABEL => made.label = field.text()?,
            node::TEXT => made.text = field.text()?,
            node::SAID => made.said = field.text()?,
            _ => {}
        }
    }
    Ok(made)
}

/// Decode a stream's message to a window. Return `None` if the message belongs to the previous stream. `ended` is the
/// number of the previous stream's last message.
///
/// # Errors
/// [`Error::Server`], [`Error::BadReply`], and [`Error::UnsafeChunk`] if the robot must not execute the nodes.
pub fn decode_window(bytes: &[u8], ended: u64, options: &Options) -> Result<Option<Window>> {
    let reply = Reply::read(bytes)?;
    let Some(mut window) = reply.window else {
        return wrong("the message: expected a window of a stream, got something else");
    };
    if reply.request_id <= ended {
        return Ok(None);
    }
    let Chunk { actions, rows, dim, .. } = reply.chunk;
    check_rows(&actions, rows, dim, true, options)?;
    if !window.sample_time.is_finite() || !window.frame_time.is_finite() {
        return unsafe_chunk("the window holds times that are not finite");
    }
    window.request_id = reply.request_id;
    (window.actions, window.rows, window.dim) = (actions, rows, dim);
    Ok(Some(window))
}

/// Decode the reply to the request `request_id` to a chunk. `seen` is the observation of that request.
///
/// # Errors
/// [`Error::Server`], [`Error::BadReply`], and [`Error::UnsafeChunk`] if the robot must not execute the actions.
pub fn decode_chunk(bytes: &[u8], request_id: u64, seen: &Observation<'_>, options: &Options) -> Result<Chunk> {
    accepted(Reply::of(bytes, request_id)?.chunk, seen, options)
}

/// Decode the reply to several observations. Return one result for each observation, in the same order.
///
/// # Errors
/// [`Error::Server`], and [`Error::BadReply`] if the number of answers and observations differs.
pub fn decode_all(
    bytes: &[u8],
    request_id: u64,
    seen: &[Observation<'_>],
    options: &Options,
) -> Result<Vec<Result<Chunk>>> {
    let reply = Reply::of(bytes, request_id)?;
    if reply.answers.len() != seen.len() {
        return wrong(format!("answers: expected {}, got {}", seen.len(), reply.answers.len()));
    }
    let each = reply.answers.iter().zip(seen);
    Ok(each.map(|(answer, seen)| accepted(Reply::read(answer)?.chunk, seen, options)).collect())
}

/// Return the JSON text in a reply to `METADATA` or `HEALTH`. Replies to other requests have the text "".
///
/// # Errors
/// [`Error::Server`], [`Error::BadReply`].
pub fn decode_control(bytes: &[u8], request_id: u64) -> Result<String> {
    Ok(Reply::of(bytes, request_id)?.metadata)
}

fn accepted(chunk: Chunk, seen: &Observation<'_>, options: &Options) -> Result<Chunk> {
    let words = seen.text_only || !seen.question.is_empty();
    check_rows(&chunk.actions, chunk.rows, chunk.dim, words, options)?;
    if chunk.adapter != seen.adapter {
        // An old server ignores the field adapter.
        return unsafe_chunk(format!("adapter: expected an answer of '{}', got '{}'", seen.adapter, chunk.adapter));
    }
    Ok(chunk)
}

/// Check the actions of a reply. `none` is true if a reply without actions is valid.
///
/// # Errors
/// [`Error::BadReply`] if the number of values does not match `rows` and `dim`, and [`Error::UnsafeChunk`] if the robot
/// must not execute the actions.
fn check_rows(actions: &[f32], rows: usize, dim: usize, none: bool, options: &Options) -> Result<()> {
    if rows.checked_mul(dim) != Some(actions.len()) || dim == 0 || (!none && rows == 0) {
        let numbers = actions.len();
        return wrong(format!("the reply holds {numbers} numbers for {rows} actions of {dim} dimensions"));
    }
    if rows > options.max_rows || dim > MAX_DIM {
        let most = options.max_rows;
        return unsafe_chunk(format!(
            "the reply: expected at most {most} rows of {MAX_DIM} numbers, got {rows} of {dim}"
        ));
    }
    for limit in [&options.low, &options.high].into_iter().flatten() {
        if limit.len() != dim {
            return unsafe_chunk(format!("limits: expected {dim} numbers, got {}", limit.len()));
        }
    }
    for (index, action) in actions.iter().enumerate() {
        if !action.is_finite() {
            return unsafe_chunk("the reply holds actions that are not finite");
        }
        let (row, column) = (index / dim, index % dim);
        let low = options.low.as_ref().map_or(f32::NEG_INFINITY, |low| low[column]);
        let high = options.high.as_ref().map_or(f32::INFINITY, |high| high[column]);
        if !(low..=high).contains(action) {
            return unsafe_chunk(format!("action {row}, dimension {column}: expected {low} to {high}, got {action}"));
        }
    }
    Ok(())
}

/// Return a server's text in a form that is safe to print: one line of at most 1,000 characters, without control
/// characters.
fn plain(text: &str) -> String {
    text.chars().take(1000).map(|each| if each.is_control() { ' ' } else { each }).collect()
}
