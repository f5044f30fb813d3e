use std::sync::Arc;

use crate::{TextError, TextTokenizer};

/// The text of tokens as they come: whole characters, and never the begin of a stop string.
pub struct TextStream {
    tokenizer: Arc<TextTokenizer>,
    stop: Vec<String>,
    ids: Vec<i64>,
    held: String,
    begin: usize, // the tokens from `begin` are decoded
    given: usize, // the text of the first `given` tokens ends with a whole character
    shown: usize, // bytes of the decoded text that were given
    stopped: bool,
}

impl TextStream {
    /// Begin after some tokens. Their text is not given, except a last character that they only begin.
    pub fn new(tokenizer: Arc<TextTokenizer>, stop: Vec<String>, after: &[i64]) -> Result<Self, TextError> {
        let stop = stop.into_iter().filter(|text| !text.is_empty()).collect();
        let ids = after.to_vec();
        let mut made = Self { tokenizer, stop, ids, held: String::new(), begin: 0, given: 0, shown: 0, stopped: false };
        let text = made.decoded()?;
        made.shown = whole(&text).len();
        made.given = if made.shown == text.len() { made.ids.len() } else { 0 };
        Ok(made)
    }

    /// Whether a stop string came; nothing after it is given.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Return the text that one more token completes. It is empty while a character or a stop string may go on.
    pub fn push(&mut self, id: i64) -> Result<String, TextError> {
        self.ids.push(id);
        let text = self.decoded()?;
        let complete = whole(&text);
        let Some(found) = complete.get(self.shown..).filter(|found| !found.is_empty()) else {
            return Ok(String::new());
        };
        self.shown = complete.len();
        if complete.len() == text.len() {
            self.begin = self.given; // a token's text depends on the tokens right before it, in decoders of words
            self.given = self.ids.len();
            self.shown = self.decoded()?.len();
        }
        Ok(self.release(found))
    }

    /// Return the text held back, after the last token.
    pub fn end(&mut self) -> Result<String, TextError> {
        let text = self.decoded()?;
        let found = self.release(text.get(self.shown..).unwrap_or(""));
        self.shown = text.len();
        Ok(if self.stopped { found } else { found + &std::mem::take(&mut self.held) })
    }

    fn decoded(&self) -> Result<String, TextError> {
        self.tokenizer.decode(&self.ids[self.begin..], false)
    }

    fn release(&mut self, found: &str) -> String {
        if self.stopped {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held) + found;
        if let Some(at) = self.stop.iter().filter_map(|stop| text.find(stop)).min() {
            self.stopped = true;
            text.truncate(at);
            return text;
        }
        let most = self.stop.iter().map(|stop| begun(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - most);
        text
    }
}

/// Return a text without a last character whose other bytes may come.
fn whole(text: &str) -> &str {
    text.trim_end_matches('\u{fffd}')
}

/// Return how many bytes at a text's end begin the stop string.
fn begun(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).rev();
    ends.into_iter().find(|&length| text.ends_with(&stop[..length])).unwrap_or(0)
}
