use std::sync::Arc;

use crate::generator::Model;
use crate::token_cache::{TokenCache, Tokens};
use crate::{ChatTemplate, Error, Generator, Options, TextStream, TextTokenizer};

/// Tokens of an answer, and why it ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReplyInfo {
    /// Tokens of the conversation before the answer.
    pub prompt_tokens: usize,
    /// Those of them that the cache had already.
    pub kept_tokens: usize,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Whether the model or a stop string ended the answer, and not the number of tokens.
    pub stopped: bool,
}

struct Turn {
    message: String,
    answer: Vec<i64>,
}

/// A conversation with an exported model. Messages that were read stay in the KV cache.
///
/// Answers are kept as their tokens. If the context is full, the oldest messages are dropped with their answers. A system
/// prompt stays. A model without a chat template goes on from each message.
pub struct Chat {
    model: Arc<Model>,
    tokenizer: Arc<TextTokenizer>,
    cache: TokenCache,
    system: Option<String>,
    template: Option<ChatTemplate>, // of a model whose turns are more than text around messages
    raw: bool,
    turns: Vec<Turn>,
    last: ReplyInfo,
}

impl Chat {
    /// Begin a conversation.
    pub fn new(model: &Generator) -> Result<Self, Error> {
        Self::begin(model, None, false)
    }

    /// Begin a conversation with a system prompt.
    pub fn with_system(model: &Generator, system: &str) -> Result<Self, Error> {
        Self::begin(model, Some(system), false)
    }

    /// Begin a text that goes on from each message, without the model's chat template.
    pub fn raw(model: &Generator) -> Result<Self, Error> {
        Self::begin(model, None, true)
    }

    fn begin(generator: &Generator, system: Option<&str>, raw: bool) -> Result<Self, Error> {
        let model = Arc::clone(&generator.model);
        let folder = model.folder.display();
        let template = match model.metadata.contains_key("no_chat") && !raw {
            true => Some(ChatTemplate::open(&model.folder)?),
            false => None,
        };
        let raw = raw || (template.is_none() && !model.metadata.contains_key("chat.begin"));
        if system.is_some() && (raw || (template.is_none() && !model.metadata.contains_key("chat.system"))) {
            return Err(Error::Invalid(format!(
                "{folder}: the model takes no system prompt; put it into the first message"
            )));
        }
        Ok(Self {
            tokenizer: generator.tokenizer()?,
            cache: TokenCache::new(generator)?,
            system: system.map(str::to_owned),
            template,
            raw,
            turns: Vec::new(),
            last: ReplyInfo::default(),
            model,
        })
    }

    /// Tokens of the last answer.
    pub fn last(&self) -> &ReplyInfo {
        &self.last
    }

    /// Return the model's answer in pieces, as they come. The pieces that came are part of the conversation, also if you stop early or
    /// cancel.
    pub fn reply(&mut self, message: &str, options: Options) -> Result<Reply<'_>, Error> {
        let turn = Turn { message: message.into(), answer: Vec::new() };
        let (ids, dropped) = self.fitting(&turn, options.max_new_tokens.min(self.model.context_length / 4))?;
        let kept = self.cache.keep(&ids)?;
        let after = if self.raw { &ids[..] } else { &[] };
        let stream = TextStream::new(Arc::clone(&self.tokenizer), options.stop.clone(), after)?;
        let Self { model, cache, turns, last, .. } = self;
        let tokens = cache.generate(&ids[kept..], &options)?;
        turns.drain(..dropped);
        turns.push(turn);
        *last = ReplyInfo { prompt_tokens: ids.len(), kept_tokens: kept, ..ReplyInfo::default() };
        let answer = &mut turns.last_mut().expect("the new turn").answer;
        Ok(Reply { stop_tokens: &model.stop_tokens, tokens: Some(tokens), stream, answer, info: last })
    }

    /// Return the tokens of the conversation with a new turn, and how many of its oldest turns they leave out so that there is room.
    fn fitting(&self, last: &Turn, room: usize) -> Result<(Vec<i64>, usize), Error> {
        let mut dropped = 0;
        loop {
            let ids = self.ids(&self.turns[dropped..], last)?;
            if ids.len().saturating_add(room) <= self.model.context_length || dropped == self.turns.len() {
                return Ok((ids, dropped));
            }
            dropped += 1;
        }
    }

    fn ids(&self, turns: &[Turn], last: &Turn) -> Result<Vec<i64>, Error> {
        let value = |name| self.model.value(name);
        let mut ids = Vec::new();
        let messages: Vec<&str> = turns.iter().chain([last]).map(|turn| turn.message.as_str()).collect();
        for (i, turn) in turns.iter().chain([last]).enumerate() {
            if let Some(template) = &self.template {
                let text = template.turn(self.system.as_deref(), &messages[..=i])?;
                ids.extend(self.tokenizer.encode(&text, false)?);
            } else if self.raw {
                ids.extend(self.tokenizer.encode(&turn.message, ids.is_empty())?);
            } else {
                let before = match &self.system {
                    _ if !ids.is_empty() => value("chat.next").to_owned(),
                    None => value("chat.begin").to_owned(),
                    Some(system) => [value("chat.system"), system, value("chat.system_end")].concat(),
                };
                ids.extend(self.tokenizer.encode(&[&before, &turn.message, value("chat.reply")].concat(), false)?);
            }
            ids.extend(&turn.answer);
        }
        Ok(ids)
    }
}

/// The pieces of an answer, as they come.
pub struct Reply<'a> {
    stop_tokens: &'a [i64],
    tokens: Option<Tokens<'a>>, // None: the answer is over
    stream: TextStream,
    answer: &'a mut Vec<i64>,
    info: &'a mut ReplyInfo,
}

impl Reply<'_> {
    /// Return the piece that one more token completes; None: the answer is over.
    fn piece(&mut self) -> Result<Option<String>, Error> {
        let Some(tokens) = &mut self.tokens else { return Ok(None) };
        if let Some(id) = tokens.next().transpose()? {
            self.info.tokens += 1;
            if !self.stop_tokens.contains(&id) {
                self.answer.push(id);
                let piece = self.stream.push(id)?;
                if self.stream.stopped() {
                    self.info.stopped = true;
                    self.tokens = None;
                }
                return Ok(Some(piece));
            }
            self.info.stopped = true;
        }
        self.tokens = None;
        let rest = self.stream.end()?;
        self.info.stopped |= self.stream.stopped();
        Ok(Some(rest))
    }
}

impl Iterator for Reply<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.piece() {
                Ok(Some(piece)) if piece.is_empty() => {}
                Ok(piece) => return piece.map(Ok),
                Err(error) => {
                    self.tokens = None;
                    return Some(Err(error));
                }
            }
        }
    }
}
