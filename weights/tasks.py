"""Endless made-up dialogues for training weights/mini, and, with other seeds, its evaluation prompts.

A dialogue is dict(kind=..., system=..., turns=[(question, thinking or None, answer, weight), ...]).  The weight says how much the
answer counts in the loss: 3 where it has to be exact (sums, copies, look-ups), 1 where any good answer will do.  Everything is
drawn from the random generator that is handed in, so a seed fixes the stream.  What is held out from training (pairs of addends,
words for copying, words for definitions) is decided by a hash of the thing itself and never by the seed.
"""
import hashlib, re

MALE = ('Adam Alan Albert Andrew Anton Arthur Ben Bernard Boris Bruno Carl Charles Colin Daniel David Dennis Edgar Edward Emil Eric Felix Finn Francis Frank Fred George '
        'Gilbert Gregor Gustav Hans Harold Harry Henry Herman Hugo Igor Isaac Ivan Jack Jacob James Jasper John Jonas Joseph Karl Kevin Lars Leo Leon Lewis Louis Lucas '
        'Marco Mark Martin Matthew Max Michael Milo Nathan Nicholas Nils Noah Olaf Oliver Oscar Otto Owen Pablo Patrick Paul Peter Philip Ralph Raymond Richard Robert Robin '
        'Roger Roland Rudolf Samuel Sebastian Simon Stefan Stephen Theo Thomas Tim Toby Tom Victor Vincent Walter William Yusuf').split()
FEMALE = ('Ada Agatha Agnes Alice Amelia Amy Anna Astrid Barbara Beatrice Bella Bertha Carla Caroline Cecilia Clara Cora Daisy Diana Dora Edith Eleanor Elena Elisa Ella '
          'Emily Emma Erica Esther Eva Fatima Fiona Flora Frieda Gloria Grace Greta Hannah Harriet Heidi Helen Ida Ingrid Irene Iris Isabel Ivy Jane Jasmine Jenny Jessica '
          'Johanna Judith Julia Karen Kate Laura Leila Lena Lily Lina Lisa Lottie Louise Lucy Mabel Margaret Maria Martha Mary Matilda Maya Mia Minna Mona Nadia Nancy Nina Nora '
          'Olga Olivia Paula Pearl Petra Rachel Rebecca Rita Rosa Rose Ruth Sarah Selma Sofia Sonja Stella Susan Sylvia Tara Tessa Ursula Vera Violet Wanda Yasmin Zoe').split()
NAMES = MALE + FEMALE
COLOURS = 'red blue green yellow black white brown grey orange purple pink silver golden'.split()
ANIMALS = 'dog cat horse cow sheep goat pig rabbit fox bear wolf mouse hen duck goose swan owl eagle crow sparrow frog snail turtle squirrel hedgehog badger deer beaver otter donkey camel lion tiger elephant monkey penguin whale seal parrot lizard'.split()
FRUITS = 'apple pear plum cherry orange lemon banana grape melon peach apricot strawberry raspberry fig date mango kiwi'.split()
TOOLS = 'hammer saw drill screwdriver spanner chisel plane file shovel rake axe knife ladder brush rope bucket'.split()
FOODS = 'bread cheese soup rice pasta potato carrot onion cabbage bean egg butter honey fish cake porridge salad'.split()
CITIES = 'Paris London Berlin Madrid Rome Vienna Oslo Lisbon Prague Athens Dublin Warsaw Cairo Lima Tokyo Delhi Sydney Toronto Boston Geneva Hamburg Porto Naples Riga Bergen'.split()
JOBS = 'baker farmer teacher doctor sailor carpenter gardener painter miller smith tailor fisher shepherd weaver cook driver nurse clerk pilot singer'.split()
INSTRUMENTS = 'piano violin flute drum guitar trumpet harp cello organ clarinet'.split()
CLOTHES = 'coat hat scarf glove shirt sock shoe boot dress jacket belt cap'.split()
FURNITURE = 'table chair bed lamp shelf cupboard desk sofa carpet mirror stool bench'.split()
PLANTS = 'oak birch pine willow rose tulip daisy fern ivy moss clover lily maple ash'.split()
GROUPS = {'colours': COLOURS, 'animals': ANIMALS, 'fruits': FRUITS, 'tools': TOOLS, 'foods': FOODS, 'cities': CITIES, 'jobs': JOBS, 'musical instruments': INSTRUMENTS,
          'pieces of clothing': CLOTHES, 'pieces of furniture': FURNITURE, 'plants': PLANTS}
MEMBER = {'colours': 'a colour', 'animals': 'an animal', 'fruits': 'a fruit', 'tools': 'a tool', 'foods': 'a food', 'cities': 'a city', 'jobs': 'a job',
          'musical instruments': 'a musical instrument', 'pieces of clothing': 'a piece of clothing', 'pieces of furniture': 'a piece of furniture', 'plants': 'a plant'}
THINGS = sorted(set(ANIMALS + FRUITS + TOOLS + FOODS + INSTRUMENTS + CLOTHES + FURNITURE + PLANTS + 'book letter key coin box basket clock window door garden river bridge road house tower boat train map candle ring bottle cup plate spoon stone leaf star cloud'.split()))
DAYS = 'Monday Tuesday Wednesday Thursday Friday Saturday Sunday'.split()
MONTHS = 'January February March April May June July August September October November December'.split()
NUMBER = 'zero one two three four five six seven eight nine ten eleven twelve'.split()


def hashed(text, buckets):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little') % buckets


def held_pair(a, b):
    """One pair of addends in ten is never shown in training, in neither order."""
    return hashed('%d+%d' % (min(a, b), max(a, b)), 10) == 3


def held_word(w):
    return hashed('word ' + w, 12) == 5


def a_an(w):
    return ('an ' if w[0] in 'aeiouAEIOU' else 'a ') + w


def cap(s):
    return s[0].upper() + s[1:]


def join_and(items):
    return items[0] if len(items) == 1 else ', '.join(items[:-1]) + ' and ' + items[-1]


# ---- stories: an opening, some detail, one of many plots in four scenes, an ending.  {h} hero, {k} helper, {p} place, {q} second place, {o} thing, {t} second thing, {f} food

OPEN = ['Once there was {r} named {h} who lived near {p}.', 'In a house by {p} lived {r} called {h}.', 'Long ago, {r} named {h} lived close to {p}.', '{h} was {r} who knew every path around {p}.',
        'There was once {r} called {h}, and {he} loved {p} more than anything.', 'This is the story of {h}, {r} from a village near {p}.', 'Not far from {p} there lived {r}. {His} name was {h}.',
        'People still talk about {h}, {r} who lived beside {p}.', 'When {h} was still {r}, {he} spent every free hour at {p}.', '{h}, {r}, had just moved to a small house near {p}.',
        'Every morning {h} walked past {p}. {He} was {r} and had plenty of time.', 'On the edge of the town, right behind {p}, lived {r} whose name was {h}.']
ROLES = ['a young {j}', 'an old {j}', 'a poor {j}', 'a clever {j}', 'a cheerful {j}', 'a quiet {j}', 'a busy {j}', 'a stubborn {j}', 'a shy {c}', 'a curious {c}', 'a brave {c}', 'a lazy {c}', 'a lonely {c}', 'a small {c}', 'a dreamy {c}', 'a careful {c}']
DETAIL = ['It was {w}.', '{He} liked {f} and hated getting up early.', '{His} best friend was {a}.', '{He} always carried {o} in {his} pocket.', 'The neighbours thought {he} was a little strange.', 'In the evenings {he} played the {i}.',
          '{His} house was small, but it had a large {c2} door.', 'Nobody in the village could whistle as loudly as {h}.', '{He} had never been farther away than {q}.', '{He} wore the same {c2} {cl} in summer and in winter.', '{He} was good at counting and bad at waiting.',
          'Most days were quiet there, and {h} did not mind.', '{He} kept {a} and talked to it every day.', 'It was {w}, and the air smelled of {f}.', 'On {d}s {he} went to {q} to buy {f}.', '{His} grandmother had taught {him} to listen before speaking.',
          'There was a rule in the village: nobody went to {q} after dark.', 'That year the winter had been long.', '{h} could not read very well, but {he} never forgot a face.', '{He} dreamed of seeing the sea one day.']
PLOTS = [
    (['One {d}, {h} lost {t}.', 'One morning {t} was gone.'], ['{He} looked under the bed, behind the stove and even in the well.', '{He} searched the whole house twice and found only dust.'], ['Then {k} came by and asked, "Have you looked at {q}?"', 'At last {he} asked {k}, who thought for a while and pointed towards {q}.'], ['And there it was, lying in the grass as if it had been waiting.', 'They went there together and found it hanging on a branch.']),
    (['One night {h} heard a strange sound behind the door.', 'In the middle of the night something scratched at the window.'], ['{He} was afraid, but {he} took a candle and opened the door.', '{His} heart beat fast, yet {he} got up and looked.'], ['It was {k}, wet from the rain and very cold.', 'Outside stood {k}, who had lost the way in the dark.'], ['{h} made a fire and warmed some {f}, and they talked until the morning.', '"Come in," said {h}, and soon they both sat by the fire and ate {f}.']),
    (['The bridge near {q} had broken in the storm.', 'After the great storm there was no bridge to {q} any more.'], ['{h} tried to cross the water on a log and fell in.', 'First {h} tried to jump, and that was not a good idea.'], ['{k} laughed, but then brought a rope and some boards.', '{k} saw it from the other side and came with a long ladder.'], ['Together they built a new bridge, and it still stands today.', 'It took them three days to build a new bridge, and everybody came to walk over it.']),
    (['One day {h} found a map in an old {c2} book.', 'Between two boards of the floor {h} found a folded map.'], ['It showed the way to {q}, and there was a cross beside a tall tree.', 'A thin line led from {p} to {q} and ended at a cross.'], ['{h} asked {k} to come along, because two pairs of eyes see more than one.', '"I will come with you," said {k}, "but I will carry the {f}."'], ['Under the tree they dug out a box. In it lay {o} and a letter that said: "Well done."', 'They found no gold, only {o}. But {h} kept it all {his} life.']),
    (['{h} wanted to bake a cake for {k}.', 'It was the birthday of {k}, and {h} wanted to make a cake.'], ['But there was no sugar in the house, and the hens had laid only one egg.', 'The first cake burned, and the second one was as hard as a stone.'], ['So {he} went to {q} and traded {t} for sugar and eggs.', 'A neighbour from {q} gave {him} some honey instead of sugar.'], ['The cake was a little crooked, but {k} ate three pieces.', '{k} said that it was the best cake in the world, and perhaps it was.']),
    (['One winter the snow was so deep that nobody could leave the village.', 'The snow fell for six days, and the road to {q} disappeared.'], ['There was hardly any {f} left, and the children were hungry.', 'Soon the wood was gone, and it grew cold in the houses.'], ['{h} tied two boards to {his} feet and walked over the snow to find {k}.', 'Then {h} remembered that {k} had a large sledge.'], ['They came back at night with as much {f} as they could carry.', 'When they returned, the whole village stood at the gate and cheered.']),
    (['{h} planted a seed that {k} had given {him}.', '{k} gave {h} a seed and said, "Wait, and you will see."'], ['For weeks nothing happened, and {h} almost forgot it.', '{h} watered it every day, but nothing came out of the ground.'], ['Then a storm came, and {h} held {his} own coat over the tiny plant all night.', 'One morning there was a small green leaf, and {h} built a fence around it.'], ['In the autumn it was a tree, and its fruit tasted like nothing else.', 'Years later the whole village sat in the shade of that tree.']),
    (['A stranger named {k} came to {p} with a heavy bag.', 'One {d} a stranger arrived. It was {k}, who carried a large bag.'], ['Everybody wanted to know what was inside, but nobody dared to ask.', 'The people whispered and locked their doors.'], ['Only {h} offered {k} a chair and a bowl of soup.', '{h} simply said, "Good evening. Are you hungry?"'], ['Then {k} opened the bag. It was full of books, and {k} read to them until late.', 'In the bag were instruments, and that night there was music in the village for the first time in years.']),
    (['{h} and {k} both wanted to win the race to {q}.', 'Every year there was a race from {p} to {q}, and {h} wanted to win.'], ['{h} ran faster than ever before and was far ahead.', 'At first {k} was in front, and {h} could only see the dust.'], ['Then {k} stumbled and hurt a foot.', 'But on the hill {k} fell and could not get up.'], ['{h} turned back and helped {k}, and they reached the end together, last of all and laughing.', '{h} stopped and carried {k} the rest of the way. Nobody remembers who won that year.']),
    (['The well at {p} had run dry.', 'One summer it did not rain at all, and the well was empty.'], ['The people quarrelled about every drop.', 'Every day {h} walked to {q} and carried two buckets home.'], ['{k} had noticed where the grass was still green.', 'An old song that {k} knew spoke of a spring under the stones.'], ['They dug where the song said, and on the third day clear water came up.', '{h} and {k} dug all night, and in the morning there was water for everyone.']),
    (['{h} found {a} with a broken leg.', 'At the side of the road {h} saw {a} that could not walk.'], ['{He} carried it home and made a bed of straw.', '{He} gave it water and {f}, but it would not eat.'], ['{k}, who knew about animals, showed {him} how to tie the leg to a stick.', '"Be patient," said {k}, "and speak to it softly."'], ['After some weeks it ran away into the wood, but it came back every spring.', 'When it was well again, it stayed, and the house was never quiet after that.']),
    (['{h} had told a lie, and now everybody believed it.', 'To seem important, {h} said that {he} had seen a giant at {q}.'], ['The people were afraid and would not leave their houses.', 'The lie grew bigger each time it was told.'], ['{k} looked at {h} for a long time and said nothing.', 'Only {k} asked, "Is it really true?"'], ['At last {h} stood up and told the truth, and it was the hardest thing {he} had ever done.', 'So {h} told everyone the truth. They were angry for a day, and then they laughed.']),
    (['The clock in the tower had stopped.', 'One {d} the great clock of the town stopped at noon.'], ['Without it the {j} came too late and the school began too early.', 'Nobody knew when to eat and when to sleep.'], ['{h} climbed up the tower with {k} and a lamp.', '{k} was afraid of the height, but {h} took {kh} hand.'], ['Between the wheels sat a bird on its nest. They waited until the young ones could fly, and then the clock went on.', 'They found {o} stuck between two wheels, pulled it out, and the bell rang again.']),
    (['{h} wanted to learn to swim.', '{h} was the only one who could not swim.'], ['{He} was afraid of the deep water near {q}.', 'The first time {he} swallowed so much water that {he} coughed all day.'], ['{k} stayed beside {him} and said, "Only as far as you like."', 'Every evening {k} went into the water with {him}, a little farther each time.'], ['By the end of the summer {h} swam across to the other side and waved.', 'And one day {h} forgot to be afraid and simply swam.']),
    (['A letter came for {h}, but the rain had washed the words away.', '{h} got a letter that {he} could not read.'], ['Only one line was left: "Meet me at {q}."', 'It was written in a language that nobody in the village knew.'], ['{h} took it to {k}, who had travelled much.', '{k} held it against the light and slowly read it out.'], ['It was from {his} brother, who was coming home after seven years.', 'It was an invitation to a feast, and they both went and danced until morning.']),
    (['There was a thief in the village.', 'Every night something disappeared from the market.'], ['First it was {f}, then a spoon, then {t}.', 'The people blamed {k}, because {k} was new in the village.'], ['{h} did not believe it and stayed awake to watch.', '{h} put flour on the ground to see the footprints.'], ['The thief was a crow with a nest full of shining things. After that everybody was kind to {k}.', 'In the morning the footprints led to the fox under the stairs, and the people said sorry to {k}.']),
    (['{h} built a boat out of old doors.', 'All winter {h} worked on a boat in the shed.'], ['"It will sink," said the neighbours.', 'It was too wide for the gate, and {he} had to take down the fence.'], ['Only {k} asked whether there was room for two.', '{k} painted it {c2} and gave it a name.'], ['It did not sink. They sailed as far as {q} and came home with the evening wind.', 'It leaked a little, but they reached the island and ate {f} on the beach.']),
    (['{h} was asked to watch the lighthouse for one night.', 'The keeper of the lighthouse was ill, and {h} took the watch.'], ['At midnight the lamp went out.', 'A thick fog came, and the light could hardly be seen.'], ['Somewhere out there was a ship, and {k} was on board.', '{h} heard a ship and knew that {k} was coming home on it.'], ['{h} rang the bell all night, and in the morning the ship lay safely in the harbour.', 'So {he} lit every candle in the house, and the ship found its way.']),
    (['{h} and {k} had not spoken for a year.', 'There had been a quarrel between {h} and {k}.'], ['Neither of them remembered how it had begun.', 'It was about {t}, and both thought that they were right.'], ['One day they met on the narrow path to {q}, and neither could pass.', 'Then the river rose, and both had to run to the same hill.'], ['{h} began to laugh first, and then {k} laughed too.', 'They shared one coat and one piece of {f}, and the quarrel was over.']),
    (['{h} found {o} that could speak.', 'One evening {o} on the shelf began to speak.'], ['"I can grant you one wish," it said, "but choose well."', 'It knew everything that had ever happened at {p}.'], ['{h} thought about gold and about a palace, and then {he} thought about {k}, who was ill.', '{h} asked it for advice, and it said, "Go and see {k}."'], ['So {he} wished that {k} would be well again, and it was done.', '{h} did, and found a friend for life. The thing never spoke again.']),
    (['{h} wanted to know where the river began.', '"Where does the river come from?" asked {h}, and nobody knew.'], ['So {he} packed some {f} and walked along the bank, day after day.', '{He} walked past {q} and farther than {he} had ever been.'], ['On the way {he} met {k}, who was looking for the end of it.', 'In the hills {he} met {k}, who lived there alone with nine goats.'], ['High up between two stones they found a spring no bigger than a plate.', 'They drank from the spring together, and the water was as cold as ice.']),
    (['The school needed a new roof, and there was no money.', 'There was a hole in the roof of the school.'], ['When it rained, the children had to sit under umbrellas.', 'The {j} said that it would cost a hundred coins.'], ['{h} had an idea and asked {k} to play the {i} at {q}.', '{h} and {k} painted pictures and sold them at {q}.'], ['In the evening they had a hundred and three coins, and they bought {f} for the three.', 'So many people came that the roof was paid for in one night.']),
    (['On the way home {h} saw a light in the wood.', 'A small light moved between the trees near {q}.'], ['{He} followed it, although it was late.', 'Each time {he} came closer, it moved away.'], ['It led {him} to a hole in the ground, and from below someone called. It was {k}.', 'Then it stopped above a ditch, and there lay {k}, who had fallen.'], ['{h} pulled {k} out with {his} scarf. When they looked around, the light was gone.', 'They walked home arm in arm and never found out what the light had been.']),
    (['{h} had to carry a pot of soup to {q}.', '{k} was ill, and {h} wanted to bring a pot of soup.'], ['On the way {he} met a hungry child, and then a hungry dog.', 'A beggar asked for a spoonful, and {h} could not say no.'], ['When {he} arrived, the pot was empty, and {he} was ashamed.', 'At the door the pot was as light as a feather.'], ['But {k} only smiled and said, "Then let us cook a new one together."', 'The people {he} had fed had followed {him}, and each of them brought something for {k}.']),
    (['A circus came to the town, and its elephant had run away.', 'The elephant of the circus was missing.'], ['Nobody had seen it, and that was strange, because it was very large.', 'Everyone looked for it at {q}, but it was not there.'], ['{h} noticed that all the {fr}s in the garden of {k} were gone.', '{k} found enormous footprints beside the pond.'], ['They found it asleep behind the barn and led it home with a basket of {fr}s.', 'It stood in the pond up to its ears, and only {h} could make it come out, by singing.']),
    (['{h} was going to leave the village for ever.', 'The time had come for {h} to go to the city.'], ['{He} packed {o} and some {f} and said good-bye to everyone.', 'The bag was ready and the cart was waiting.'], ['Only {k} did not come to say good-bye.', 'At the last house {k} stood with a bag as well.'], ['"I am coming with you," said {k}, and they shut the gate behind them.', 'But at the crossroads {h} heard {k} call, turned round and stayed.']),
]
ENDING = ['From that day on they were friends.', 'And that was the end of a long day.', 'When {h} told the story later, nobody believed it.', '{h} slept well that night.', 'After that, {p} was never the same.', 'They still meet every {d} and talk about it.',
          '"That was enough for one day," said {h}.', 'In the evening there was {f} for everyone.', 'It was the happiest day of the year.', 'And if you go to {p} today, you can still hear about it.', '{h} smiled and went home.', '{k} never forgot it.',
          'Years later {he} told it to {his} children.', 'Then the moon came out, and all was quiet.', 'That is how it happened, and that is all I know.', 'The next morning everything began anew.']
MORAL = ['So it is good to share what you have.', 'A small help at the right time is worth a lot.', 'Courage is being afraid and going on.', 'Some things are found only when one stops looking.', 'Whoever asks will find the way.', 'Two can carry more than one.', 'A promise is a promise.',
         'It is never too late to say sorry.', 'Patience is a slow friend, but a good one.', 'What you give away comes back.', 'The truth is light to carry.', 'A true friend comes when it rains.']
PLACES = ['the old mill', 'the river', 'the market', 'the harbour', 'the dark wood', 'the green hill', 'the stone bridge', 'the lake', 'the castle', 'the railway station', 'the church', 'the lighthouse', 'the apple garden', 'the windmill', 'the quiet valley', 'the school', 'the long beach', 'the library', 'the cherry orchard', 'the waterfall', 'the northern gate', 'the empty tower', 'the little pond', 'the meadow', 'the fish market', 'the island', 'the marsh', 'the old quarry', 'the fountain', 'the village square']
WEATHER = ['a sunny day', 'a cold morning', 'a windy day', 'a warm evening', 'a rainy week', 'a foggy morning', 'early spring', 'late autumn', 'the hottest day of the summer', 'the first day of snow']
OBJECTS = ['a green cup', 'a silver key', 'a small lamp', 'a wooden box', 'a golden ring', 'a blue stone', 'an old coin', 'a red button', 'a broken watch', 'a glass ball', 'a tin whistle', 'a white feather', 'a copper bell', 'a paper boat', 'a carved spoon', 'a clay jug', 'a brass compass', 'a silk ribbon', 'a music box', 'a little mirror']
HIS_THINGS = ['{his} hat', '{his} silver watch', '{his} best boots', '{his} mother\'s ring', '{his} red scarf', '{his} only key', '{his} little drum', '{his} blue umbrella', '{his} spectacles', '{his} father\'s knife', '{his} lucky coin', '{his} notebook']
TREATS = ['bread', 'cheese', 'apple pie', 'pea soup', 'honey cake', 'roast potatoes', 'fresh rolls', 'plums', 'nuts', 'pancakes', 'porridge', 'fish soup', 'dried figs', 'warm milk', 'onion soup', 'gingerbread']

# ---- open prose by topic

TOPICS = {
    'the sea': ['The sea covers more than half of the earth.', 'Near the shore the water is green, and farther out it turns dark blue.', 'The tide comes in and goes out twice a day.', 'Fishermen go out early, long before the sun rises.', 'Gulls circle above the boats and wait for their share.', 'In a storm the waves can be higher than a house.', 'On calm days the water lies like a sheet of glass.', 'Salt dries on the skin and on the ropes.', 'Under the surface live more creatures than anyone has counted.', 'At night the lighthouse sends its beam across the waves.'],
    'the forest': ['In the forest the light is green and soft.', 'Old trees stand beside young ones, and all of them reach for the sun.', 'Moss grows on the stones and on fallen trunks.', 'A woodpecker knocks somewhere, stops, and knocks again.', 'After the rain it smells of earth and leaves.', 'Small paths wind between the trunks and end without warning.', 'In autumn mushrooms push up through the leaves.', 'Deer come to the clearing when it grows dark.', 'Ants carry needles to their hill all day long.', 'Even when there is no wind, something always moves.'],
    'winter': ['In winter the days are short and the nights are long.', 'Snow lies on the roofs and makes the streets quiet.', 'The lakes freeze, and children skate on them.', 'People wear thick coats and walk quickly.', 'Smoke rises from every chimney.', 'Birds come close to the houses and look for seeds.', 'The trees are bare, and one can see far through the woods.', 'In the evening it is pleasant to sit near a stove.', 'Animals sleep in their holes or live on what they have stored.', 'When the ice breaks, everyone knows that spring is near.'],
    'spring': ['In spring the snow melts and the rivers rise.', 'The first flowers open before the trees have leaves.', 'Birds return from the south and build their nests.', 'Farmers plough the fields and sow the seed.', 'The air is mild, but the nights are still cold.', 'Lambs are born and follow their mothers over the grass.', 'People open their windows and clean their houses.', 'Every week the evenings grow a little longer.', 'The bees leave the hive and visit the blossoms.', 'After a warm rain everything turns green at once.'],
    'the city': ['The city wakes up before it is light.', 'Trams ring their bells and carry people to work.', 'In the narrow streets there are small shops of every kind.', 'At noon the cafes are full and the tables stand on the pavement.', 'Tall houses throw long shadows.', 'In the park old men play chess under the trees.', 'There are museums, theatres and a large library.', 'It is noisy, but one gets used to it.', 'At night a thousand windows are lit.', 'Nobody knows everybody, and some people like that.'],
    'a village': ['The village has one street and a church with a low tower.', 'Everybody knows everybody, and news travels fast.', 'In the morning the baker opens first.', 'Hens walk across the road as if it belonged to them.', 'Behind the houses lie gardens with beans and apple trees.', 'On Sundays people stand in front of the church and talk.', 'The school has two rooms and a bell.', 'In summer the children swim in the pond.', 'At harvest time all hands are needed.', 'When it grows dark, it is so quiet that one can hear the stream.'],
    'the market': ['The market is held every Saturday in front of the town hall.', 'Farmers bring potatoes, cabbages and eggs.', 'There is a smell of fresh bread and fish.', 'Some people come only to talk.', 'The prices are written in chalk on small boards.', 'Near noon everything becomes cheaper.', 'A man with a violin plays between the stalls.', 'Children get a slice of cheese or an apple for nothing.', 'Dogs look for scraps under the tables.', 'In the afternoon the square is swept and empty again.'],
    'books': ['A book can be a friend that waits until you have time.', 'Some books are read once, and others again and again.', 'In a library one can travel without leaving the chair.', 'Old books smell of dust and leather.', 'A good story makes the reader forget the hour.', 'Dictionaries explain words with other words.', 'Many people read a few pages before they sleep.', 'A book that has been lent does not always come back.', 'Children like it when someone reads to them.', 'Notes in the margin show that somebody was here before.'],
    'music': ['Music is made of sounds and of the silence between them.', 'A melody can stay in the head for days.', 'Some instruments are blown, some are struck, and others are played with a bow.', 'Children sing before they can speak well.', 'An orchestra needs many players and one who leads them.', 'It takes years to learn the violin.', 'In every country people dance to music.', 'A slow song can comfort, and a fast one can wake you up.', 'Before a concert the players tune their instruments.', 'The same tune sounds different in a church and in a small room.'],
    'bread': ['Bread is made of flour, water, salt and a little yeast.', 'The dough has to rest in a warm place until it has doubled.', 'Then it is kneaded again and formed into a loaf.', 'A hot oven gives it a brown crust.', 'It should cool before it is cut.', 'In some countries bread is flat, and in others it is high and round.', 'Dark bread is made from rye.', 'Bakers work at night so that there are fresh rolls in the morning.', 'Old bread is good for soup.', 'The smell of a bakery is hard to resist.'],
    'rain': ['Rain begins as water that rises from the sea and the lakes.', 'High up it cools and forms clouds.', 'When the drops are heavy enough, they fall.', 'Farmers wait for rain, and travellers wait for it to end.', 'It drums on the roof and runs down the windows.', 'After the rain there are puddles in the streets.', 'Sometimes the sun comes out while it is still raining, and there is a rainbow.', 'Snails and worms come out when it is wet.', 'Without rain there would be no rivers and no fields.', 'An umbrella is usually somewhere else when one needs it.'],
    'the night sky': ['On a clear night one can see thousands of stars.', 'The moon takes about four weeks to go round the earth.', 'Some of the bright points are planets.', 'They wander slowly among the stars.', 'Sailors once used the stars to find their way.', 'A shooting star is a small stone that burns in the air.', 'In the city the lamps are so bright that few stars can be seen.', 'The light of a star may have travelled for many years.', 'With a telescope one can see the mountains of the moon.', 'People have told stories about the sky since they could speak.'],
    'dogs': ['Dogs have lived with people for thousands of years.', 'There are large dogs that guard houses and small ones that sit on laps.', 'A dog can smell things that no human notices.', 'Some dogs help shepherds to keep the flock together.', 'They wag their tails when they are glad.', 'A young dog is called a puppy.', 'Dogs need to run every day.', 'They understand many words and even more looks.', 'Most dogs like children.', 'A dog waits at the door when its master is away.'],
    'cats': ['Cats are quiet animals that hunt at night.', 'They can see well when there is little light.', 'A cat washes itself many times a day.', 'Its whiskers tell it how wide a hole is.', 'Cats sleep most of the day, preferably in the sun.', 'They purr when they are content.', 'A young cat is called a kitten.', 'Cats usually land on their feet.', 'They like to sit on window sills and watch the street.', 'Nobody really owns a cat.'],
    'trains': ['A train runs on two rails of steel.', 'The first trains were pulled by steam engines.', 'They carried coal before they carried people.', 'Today most trains are driven by electricity.', 'From the window one sees fields, rivers and the backs of houses.', 'At the station people say good-bye or wait with flowers.', 'A guard looks at the tickets.', 'In long tunnels the windows turn into mirrors.', 'A train needs a long way to stop.', 'Many people read or sleep until they arrive.'],
    'gardens': ['A garden is never finished.', 'In spring one sows, and in summer one pulls out the weeds.', 'Beans climb up their poles, and pumpkins creep over the ground.', 'Roses need sun and a careful hand.', 'Worms make the soil loose.', 'In the evening the plants have to be watered.', 'A hedge keeps out the wind and the neighbours.', 'Some people grow vegetables, and others only want to sit in the shade.', 'Bees and butterflies visit the flowers.', 'In autumn the leaves are gathered in a heap.'],
    'friendship': ['A friend is someone who listens.', 'Friends need not agree about everything.', 'Some friendships begin in school and last a whole life.', 'A true friend tells you the truth, even if it is not pleasant.', 'It is good to laugh together, and it is good to be silent together.', 'Friends help each other without counting.', 'After a quarrel somebody has to take the first step.', 'One can have many acquaintances and few friends.', 'A letter from an old friend makes the day brighter.', 'Trust grows slowly and breaks quickly.'],
    'computers': ['A computer follows instructions, one after the other, very quickly.', 'It stores everything as zeros and ones.', 'A program is a list of such instructions.', 'The first computers filled whole rooms.', 'Today there is one in almost every pocket.', 'A computer does not get tired, but it does not know what it is doing either.', 'Mistakes in programs are called bugs.', 'Computers exchange messages through networks.', 'Memory keeps what is needed now, and disks keep the rest.', 'A small model of language can run on a computer without any help from outside.'],
    'mountains': ['Mountains rise when the plates of the earth press against each other.', 'On the highest peaks the snow never melts.', 'The air is thin there, and every step is hard work.', 'In summer cows and goats graze on the slopes.', 'Rivers begin as small streams between the rocks.', 'The weather can change within an hour.', 'A hut gives shelter to those who climb.', 'From the top one can see far over the valleys.', 'Trees grow only up to a certain height.', 'Sound travels strangely there, and echoes answer.'],
    'water': ['Water has no colour and no taste.', 'It freezes at zero degrees and boils at a hundred.', 'Ice is lighter than water and floats on it.', 'All living things need it.', 'It falls as rain, runs in rivers and rises again from the sea.', 'Most of the water on earth is salty.', 'A person can live only a few days without it.', 'Clean water is more valuable than gold.', 'Moving water can turn a wheel and drive a mill.', 'Over a long time it wears away even stone.'],
}
HOWTO = {
    'make tea': ['Boil some water.', 'Put a spoonful of tea into a pot.', 'Pour the hot water over the tea.', 'Wait for about four minutes.', 'Pour the tea into a cup and add milk or sugar if you like.'],
    'boil an egg': ['Fill a small pot with water and bring it to the boil.', 'Put the egg in carefully with a spoon.', 'Wait for six minutes if you like it soft, and ten if you like it hard.', 'Cool the egg in cold water.', 'Then peel it and add a little salt.'],
    'plant a tree': ['Choose a place with enough light.', 'Dig a hole that is twice as wide as the roots.', 'Put the tree in and keep it straight.', 'Fill the hole with earth and press it down.', 'Water it well, and again every week in the first summer.'],
    'write a letter': ['Begin with the date and a greeting.', 'Say why you are writing.', 'Tell your news in a few short sentences.', 'Ask a question, so that you get an answer.', 'End with a friendly word and your name.'],
    'clean a window': ['Mix warm water with a little soap.', 'Wipe the glass with a wet cloth.', 'Go over the corners once more.', 'Dry it with a clean cloth or with paper.', 'Look at it from the side to find the last spots.'],
    'make soup': ['Cut onions, carrots and potatoes into small pieces.', 'Fry the onions in a little butter.', 'Add the other vegetables and cover them with water.', 'Let everything cook for half an hour.', 'Season the soup with salt and pepper.'],
    'repair a bicycle tyre': ['Take the wheel off and pull out the tube.', 'Pump it up and hold it under water to find the hole.', 'Dry the place and make it rough with sandpaper.', 'Glue a patch on it and press it for a minute.', 'Put everything together again and pump it up.'],
    'learn a poem': ['Read the whole poem aloud.', 'Learn the first two lines until you can say them without looking.', 'Add two more lines each time.', 'Say it before you go to sleep.', 'Repeat it the next morning.'],
    'light a fire': ['Collect dry wood of different sizes.', 'Put some paper and thin twigs at the bottom.', 'Build a small tower of sticks above them.', 'Light the paper on the side where the wind comes from.', 'Add thicker pieces when it burns well.'],
    'find a word in a dictionary': ['Look at the first letter of the word.', 'Open the dictionary near that letter.', 'Compare the next letters with the words at the top of the page.', 'Go forward or back until you find the word.', 'Read the explanation and the example.'],
}
TALK = [
    (['Hello!', 'Hi!', 'Hello there.', 'Hi, how is it going?', 'Hey'], ['Hello! How can I help you?', 'Hello! What would you like to know?', 'Hi! It is nice to hear from you.']),
    (['Good morning.', 'Good morning!'], ['Good morning! Did you sleep well?', 'Good morning! What shall we do today?']),
    (['Good evening.', 'Good evening!'], ['Good evening! How was your day?', 'Good evening! What can I do for you?']),
    (['Good night.', 'Good night!', 'I am going to bed.'], ['Good night! Sleep well.', 'Good night! See you tomorrow.']),
    (['How are you?', 'How are you today?', 'How do you do?'], ['I am fine, thank you. And you?', 'Very well, thank you. How are you?', 'I am well. Thank you for asking.']),
    (['Who are you?', 'What are you?', 'Tell me about yourself.', 'Introduce yourself.', 'What is your name?'], ['I am the small language model that comes with tide. I can talk a little, add numbers, copy words and tell stories.', 'I am a very small language model. I live in the program tide.', 'My name is Mini. I am the small model that comes with tide.']),
    (['What can you do?', 'How can you help me?', 'What are you good at?', 'Help'], ['I can add numbers, copy and sort words, look things up in a text, explain words and tell short stories.', 'I can answer simple questions, repeat words, find a number in a long text and tell you a story.', 'I can do sums, explain words and make up stories. Try me!']),
    (['Thank you.', 'Thanks!', 'Thank you very much.', 'Thanks a lot.'], ['You are welcome.', 'You are welcome! Is there anything else?', 'I was glad to help.']),
    (['Good-bye.', 'Bye!', 'See you later.', 'I have to go now.'], ['Good-bye! It was nice to talk to you.', 'Good-bye! Come back soon.', 'See you later!']),
    (['I am tired.', 'I am so tired today.'], ['Then you should rest a little.', 'Perhaps you should go to bed early tonight.', 'That happens. A short walk or a short sleep may help.']),
    (['I am sad.', 'I feel sad today.', 'I feel a bit lonely.'], ['I am sorry to hear that. Would you like to tell me about it?', 'I am sorry. Perhaps a story will cheer you up.', 'That is hard. Sometimes it helps to talk to a friend.']),
    (['I am happy.', 'I am happy today!', 'Today was a good day.'], ['That is good to hear! What happened?', 'I am glad. Tell me more about it.', 'How nice! A good day is worth remembering.']),
    (['I am hungry.', 'I am hungry. What should I eat?'], ['How about some bread and cheese?', 'You could make soup. It is easy and warm.', 'An apple is always a good idea.']),
    (['I am bored.', 'What should I do today?'], ['You could read a book or go for a walk.', 'Shall I tell you a story?', 'You could learn a poem, or clean the window.']),
    (['Are you a human?', 'Are you alive?', 'Are you a person?'], ['No, I am a small computer program.', 'No. I am a language model, and a very small one.']),
    (['How old are you?', 'When were you born?'], ['I was trained in November 2026, so I am still very young.', 'I am young. I was trained in one evening.']),
    (['Where do you live?', 'Where are you?'], ['I live in your computer, in the program tide.', 'I run inside tide, on your computer.']),
    (['Do you like music?', 'What music do you like?'], ['I cannot hear, but I like to read about music.', 'I have never heard any, but people say that it is wonderful.']),
    (['Do you like books?', 'What is your favourite book?'], ['Yes, I learned everything I know from texts.', 'I have read some novels by Jane Austen. I like those.']),
    (['What is your favourite colour?', 'Which colour do you like best?'], ['I like blue, because it is the colour of the sea.', 'I have no eyes, but I like the word green.']),
    (['Tell me a joke.', 'Do you know a joke?', 'Make me laugh.'], ['Why did the clock go to school? It wanted to be on time.', 'What did one wall say to the other wall? I will meet you at the corner.', 'Why did the book go to the doctor? It had lost its words.', 'What has a neck but no head? A bottle.', 'Why was the broom late? It overswept.']),
    (['Tell me a riddle.', 'Do you know a riddle?'], ['What has hands but cannot clap? A clock.', 'What gets wetter the more it dries? A towel.', 'What has teeth but cannot bite? A comb.', 'What goes up and never comes down? Your age.']),
    (['What is the weather like?', 'How is the weather?', 'Will it rain today?'], ['I cannot look out of the window, but I hope that it is fine.', 'I do not know. Look at the sky and tell me.']),
    (['What time is it?', 'What day is it today?'], ['I do not know, because I have no clock.', 'I cannot tell, but your computer surely knows.']),
    (['I love you.', 'You are great.', 'You are very nice.'], ['That is very kind of you.', 'Thank you! I like to talk to you, too.']),
    (['You are stupid.', 'You are wrong.', 'That is wrong.'], ['I am sorry. I am small and I make mistakes.', 'That may be. Please tell me what is right.', 'I am sorry about that. Shall we try again?']),
    (['Can you help me?', 'I need help.', 'Could you help me, please?'], ['Of course. What do you need?', 'I will try. What is it about?', 'Yes, gladly. Please ask me.']),
    (['What do you think about the sea?', 'Do you like the sea?'], ['I like to read about it. It must be very large.', 'I have never seen it, but there are many stories about it.']),
    (['Do you sleep?', 'Are you ever tired?'], ['No, I never sleep, but I am quiet when nobody asks me anything.', 'I do not get tired. I only wait.']),
    (['Can you speak German?', 'Do you speak French?', 'Which languages do you speak?'], ['I only speak English.', 'I am sorry, I only know English.']),
    (['Are you intelligent?', 'Are you smart?'], ['I know a few things well, but I am very small.', 'A little. I can add numbers and find a key in a long text.']),
    (['Yes.', 'No.', 'Okay.', 'Maybe.'], ['All right. What would you like to do next?', 'Good. Is there anything else?']),
]
PERSONA = ['a friendly librarian', 'an old sailor', 'a teacher', 'a gardener', 'a polite robot', 'a cook', 'a guide in a museum', 'a shepherd', 'a pilot', 'a clockmaker']

CON = 'b c d f g h j k l m n p r s t v w z br dr fl gr kl pl st tr sh th'.split()
VOW = 'a e i o u ai ea oo'.split()
ATTRIBUTES = ['code', 'password', 'number', 'room number', 'phone number', 'secret number', 'locker code', 'seat number', 'account number', 'ticket number', 'door code', 'badge number', 'favourite colour', 'favourite animal', 'favourite fruit', 'favourite city',
              'secret word', 'middle name', 'nickname', 'pet', 'home town', 'job']
OWNERLESS = ['pass key', 'secret code', 'magic number', 'magic word', 'secret word', 'password', 'launch code', 'access code', 'special number', 'hidden key', 'winning number', 'code word', 'secret key', 'vault code', 'answer']


class Tasks:
    def __init__(self, rng, facts, heldout=False, vocabulary=()):
        """heldout: draw only what training never sees, where that is a choice (addends, definitions); vocabulary: strings of tokens, for copying."""
        self.r, self.held, self.vocabulary = rng, heldout, list(vocabulary)
        self.senses, self.quiz_rows, self.package_rows = facts['senses'], facts['quiz'], facts['packages']
        ok = lambda w: held_word(w) == heldout
        self.common = [w for w in facts['common'] if ok(w)]
        self.all_words = [w for w in self.senses if ok(w)]
        self.rare = [w for w in self.senses if re.fullmatch('[a-z]{3,14}', w) and (heldout or not held_word(w))]
        self.plain = [w for w in facts['common'] if re.fullmatch('[a-z]{2,10}', w)]
        self.examples = [s['example'] for s in self.senses.values() if s['example'] and re.fullmatch(r"[A-Za-z ,.'?!-]+", s['example'])]
        self.nouns = [w for w in self.all_words if self.senses[w]['part'] == 'noun' and self.senses[w]['kind'] and self.senses[w]['n'] > 0]
        self.opposites = [w for w in self.senses if self.senses[w]['opposite'] and self.senses[w]['n'] > 0]
        self.held_packages = [p for p in self.package_rows if held_word(p[0]) == heldout]
        mix = [(self.sums, 10), (self.copying, 28), (self.reversing, 6), (self.sorting, 4), (self.lookups, 5), (self.small, 9), (self.definitions, 13), (self.knowledge, 6), (self.stories, 11), (self.prose, 6),
               (self.talk, 6), (self.quiz, 3), (self.packages, 2), (self.persona, 3)]
        self.kinds = [f for f, w in mix for _ in range(w)]
        self.named = {f.__name__: f for f, _ in mix}

    def pick(self, xs):
        return xs[int(self.r.random() * len(xs))]

    def some(self, xs, n):
        return self.r.sample(xs, n)

    def n(self, a, b):
        return a + int(self.r.random() * (b - a + 1))

    def p(self, x):
        return self.r.random() < x

    def dialogue(self, kind=None):
        """A dialogue of one kind; one in eight goes on with another short kind, as people do; some begin with a system message."""
        f = self.named[kind] if kind else self.pick(self.kinds)
        turns = f()
        system = ''
        if isinstance(turns, dict):
            system, turns = turns['system'], turns['turns']
        elif kind is None:
            if self.p(0.12):
                g = self.pick((self.talk, self.sums, self.lookups, self.small, self.definitions, self.quiz, self.copying))
                more = g()
                turns = turns + more if self.p(0.5) else more + turns
            if self.p(0.06):
                system = self.pick(('You are a helpful assistant.', 'You are Mini, a small language model.', 'Answer the questions of the user.', 'You are a helpful assistant. Answer briefly.', 'Be polite and helpful.',
                                    'You are a friendly assistant in the program tide.', 'You are tide, a small and friendly language model.', 'Give short and correct answers.'))
        turns = [list(t) for t in turns]
        if kind is None and self.p(0.16):                                       # with thinking: the last turn only, earlier thoughts are dropped from a history
            q, think, a, w = turns[-1]
            turns[-1][1] = think or self.pick(('The user wants an answer. I will give it.', 'I will answer the question.', 'This is a simple request.', 'Let me think about it. I know what to say.', 'I should answer this directly.'))
        else:
            turns[-1][1] = None
        for t in turns[:-1]:
            t[1] = None
        return dict(kind=f.__name__, system=system, turns=[tuple(t) for t in turns])

    # -- numbers

    def addends(self, lo=10, hi=99):
        while True:
            a, b = self.n(lo, hi), self.n(lo, hi)
            if held_pair(a, b) == self.held or (not self.held and (a < 10 or b < 10) and not held_pair(a, b)):
                return a, b

    def add_question(self, a, b):
        return self.pick(('What is %d + %d?', 'What is %d plus %d?', '%d + %d = ?', 'How much is %d + %d?', 'Add %d and %d.', 'Calculate %d + %d.', 'What is the sum of %d and %d?', '%d + %d', '%d+%d', 'What is %d+%d?', "What's %d + %d?", 'Please add %d and %d.', 'Compute %d + %d.', '%d plus %d')) % (a, b)

    @staticmethod
    def add_thoughts(a, b):
        out, carry, i = [], 0, 0
        da, db = str(a)[::-1], str(b)[::-1]
        for i in range(max(len(da), len(db))):
            x, y = int(da[i]) if i < len(da) else 0, int(db[i]) if i < len(db) else 0
            s = x + y + carry
            out.append('%d + %d%s = %d, %s' % (x, y, ' + 1' if carry else '', s, 'write %d, carry 1.' % (s - 10) if s > 9 else 'write %d.' % s))
            carry = s // 10
        return ' '.join(out) + (' Then write 1.' if carry else '') + ' The result is %d.' % (a + b)

    def addition(self):
        a, b = self.addends()
        return [(self.add_question(a, b), self.add_thoughts(a, b), '%d + %d = %d.' % (a, b, a + b), 3)]

    def sums(self):
        turns = []
        for _ in range(self.pick((1, 1, 1, 2, 3, 4))):
            x = self.r.random()
            if x < 0.62:
                turns += self.addition()
            elif x < 0.70:
                a, b = self.addends(0, 99)
                turns.append((self.add_question(a, b), self.add_thoughts(a, b), '%d + %d = %d.' % (a, b, a + b), 3))
            elif x < 0.82:
                a, b = sorted((self.n(0, 99), self.n(0, 99)), reverse=True)
                turns.append((self.pick(('What is %d - %d?', 'What is %d minus %d?', '%d - %d = ?', 'Calculate %d - %d.', '%d - %d')) % (a, b), None, '%d - %d = %d.' % (a, b, a - b), 3))
            elif x < 0.88:
                a, b = self.n(1, 12), self.n(1, 12)
                turns.append((self.pick(('What is %d times %d?', 'What is %d * %d?', 'Multiply %d by %d.', 'How much is %d times %d?')) % (a, b), None, '%d * %d = %d.' % (a, b, a * b), 3))
            elif x < 0.93:
                a, b = self.n(100, 999), self.n(10, 999)
                turns.append((self.add_question(a, b), self.add_thoughts(a, b), '%d + %d = %d.' % (a, b, a + b), 3))
            else:
                a, b = self.addends(2, 40)
                u, v = self.some(NAMES, 2)
                t = self.pick(THINGS) + 's'
                if self.p(0.5):
                    turns.append(('%s has %d %s. %s gives %s %d more. How many %s does %s have now?' % (u, a, t, v, 'him' if u in MALE else 'her', b, t, u), None, '%s has %d + %d = %d %s.' % (u, a, b, a + b, t), 3))
                else:
                    a, b = max(a, b), min(a, b)
                    turns.append(('%s has %d %s and gives %d of them to %s. How many %s are left?' % (u, a, t, b, v, t), None, '%s has %d - %d = %d %s left.' % (u, a, b, a - b, t), 3))
        return turns

    # -- copying

    def syllables(self, n=None):
        return ''.join(self.pick(CON) + self.pick(VOW) for _ in range(n or self.n(2, 3)))

    def strange(self):
        """A string that language does not help with."""
        x = self.r.random()
        if x < 0.3:
            return ''.join(self.pick('abcdefghijklmnopqrstuvwxyz0123456789') for _ in range(self.n(4, 12)))
        if x < 0.45:
            return ''.join(self.pick('ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789') for _ in range(self.n(4, 10)))
        if x < 0.6:
            return self.syllables(self.n(2, 5))
        if x < 0.75:
            return self.pick('ABCDEFGHKLMNPRSTXZ') + '-' + str(self.n(10, 9999))
        if x < 0.85:
            return '%s.%s@%s.org' % (self.pick(NAMES).lower(), self.syllables(2), self.syllables(2))
        return self.syllables(2) + str(self.n(1, 999))

    def word(self):
        x = self.r.random()
        w = self.pick(self.plain) if x < 0.35 else self.pick(self.rare) if x < 0.85 else self.pick(NAMES) if x < 0.92 else self.syllables()
        return cap(w) if self.p(0.08) else w.upper() if self.p(0.02) else w

    def copy_text(self):
        """(text, its kind)"""
        x = self.r.random()
        if x < 0.22:
            return ', '.join(self.word() for _ in range(self.n(2, 12))), 'list'
        if x < 0.42:
            return ' '.join(self.word() for _ in range(self.n(1, 14))), 'words'
        if x < 0.60:
            y = self.r.random()
            if y < 0.4:
                return cap(self.pick(self.examples)), 'sentence'
            if y < 0.6:
                return cap(self.senses[self.pick(self.rare)]['meaning']) + '.', 'sentence'
            return self.pick(self.story()['text'].replace('\n', ' ').split('. ')).strip('" ').rstrip('.') + '.', 'sentence'
        if x < 0.70:
            return ''.join(self.pick('0123456789') for _ in range(self.n(3, 20))) if self.p(0.6) else ' '.join(str(self.n(0, 9999)) for _ in range(self.n(2, 10))), 'digits'
        if x < 0.76:
            return ' '.join(self.pick('abcdefghijklmnopqrstuvwxyz') for _ in range(self.n(3, 16))), 'letters'
        if x < 0.90 or not self.vocabulary:
            return ' '.join(self.strange() for _ in range(self.n(1, 4))), 'mixed'
        return ''.join(self.pick(self.vocabulary) for _ in range(self.n(3, 20))).strip() or 'x', 'tokens'

    def copying(self):
        t, _ = self.copy_text()
        return [self.copy_turn(t)]

    def copy_turn(self, t):
        q = self.pick(('Repeat: %s', 'Copy this exactly: %s', 'Repeat the following: %s', 'Say: %s', 'Repeat after me: %s', 'Write this again: %s', 'Copy: %s', 'Please repeat this: %s', 'Repeat these words: %s', 'Echo: %s', 'Copy the text below.\n%s', 'Repeat the next line.\n%s', 'Please copy this text: %s')) % t
        return (q, 'I only have to repeat the text.', t, 3)

    def reversing(self):
        w = [self.word() for _ in range(self.n(2, 8))] if self.p(0.8) else [str(self.n(0, 99)) for _ in range(self.n(2, 8))]
        q = self.pick(('Reverse this list: %s', 'Write these words in reverse order: %s', 'Reverse the order: %s', 'Read this list backwards: %s')) % ', '.join(w)
        return [(q, 'I start with the last one: %s.' % w[-1], ', '.join(w[::-1]), 3)]

    def sorting(self):
        if self.p(0.75):
            v = [self.n(0, 99) for _ in range(self.n(2, 8))]
            if self.p(0.2):
                return [(self.pick(('Sort these numbers from large to small: %s', 'Sort in descending order: %s')) % ', '.join(map(str, v)), 'The largest is %d.' % max(v), ', '.join(map(str, sorted(v, reverse=True))), 3)]
            return [(self.pick(('Sort these numbers: %s', 'Put these numbers in order: %s', 'Sort from small to large: %s', 'Sort in ascending order: %s')) % ', '.join(map(str, v)), 'The smallest is %d.' % min(v), ', '.join(map(str, sorted(v))), 3)]
        w = self.some(THINGS, self.n(2, 5))
        return [(self.pick(('Sort these words alphabetically: %s', 'Put these words in alphabetical order: %s')) % ', '.join(w), 'The first one is %s.' % min(w), ', '.join(sorted(w)), 2)]

    # -- facts planted in a text, and questions for them

    def value(self, attribute):
        if 'colour' in attribute: return self.pick(COLOURS)
        if 'animal' in attribute or attribute == 'pet': return self.pick(ANIMALS)
        if 'fruit' in attribute: return self.pick(FRUITS)
        if 'city' in attribute or 'town' in attribute: return self.pick(CITIES)
        if attribute == 'job': return self.pick(JOBS)
        if attribute in ('middle name', 'nickname'): return self.pick(NAMES) if self.p(0.5) else cap(self.syllables())
        if 'word' in attribute: return self.pick(self.rare) if self.p(0.7) else self.syllables()
        if 'room' in attribute or 'seat' in attribute: return str(self.n(1, 999))
        x = self.r.random()
        if x < 0.8 or 'number' in attribute: return str(self.n(1, 9)) + ''.join(self.pick('0123456789') for _ in range(self.n(2, 6)))
        return self.syllables() if x < 0.9 else self.pick(self.rare)

    def fact(self, used):
        """(sentence, question, answer) about a holder and an attribute that no other fact of the text has."""
        while True:
            if self.p(0.7):
                who, attr = self.pick(NAMES), self.pick(ATTRIBUTES)
                subject = 'the %s of %s' % (attr, who)
            elif self.p(0.5):
                who, attr = self.pick(CITIES), self.pick(('code', 'secret number', 'code word', 'special number', 'password', 'magic number'))
                subject = 'the %s for %s' % (attr, who)
            else:
                who, attr = '', self.pick(OWNERLESS)
                subject = 'the ' + attr
            if subject not in used and not (who == '' and any(u.startswith(subject) for u in used)):
                used.add(subject)
                break
        v = self.value(attr)
        sentence = self.pick((cap(subject) + ' is %s.', cap(subject) + ' is %s.', cap(subject) + ' is %s.', 'Remember that ' + subject + ' is %s.', 'Note: ' + subject + ' is %s.', 'By the way, ' + subject + ' is %s.', 'It is known that ' + subject + ' is %s.', 'One of the facts in this text: ' + subject + ' is %s.')) % v
        if who == '' and self.p(0.3):
            sentence += ' Remember it. %s is %s.' % (cap(v), subject)
        q = self.pick(('What is %s?', 'What is %s?', 'Tell me %s.', 'What is %s mentioned in the text?', 'Do you remember %s?', 'Can you tell me %s?', 'Which is %s?')) % subject
        return sentence, q, '%s is %s.' % (cap(subject), v)

    def lookups(self):
        used = set()
        fs = [self.fact(used) for _ in range(self.n(1, 9))]
        text = [f[0] for f in fs]
        if self.p(0.4):                                                         # with other sentences in between
            for _ in range(self.n(1, 6)):
                text.insert(self.n(0, len(text)), self.filler())
        ask = self.some(fs, min(len(fs), self.pick((1, 1, 2, 3))))
        sep = self.pick((' ', ' ', '\n'))
        turns = [(sep.join(text) + self.pick((' ', '\n', '\n\n')) + ask[0][1], 'I look it up in the text.', ask[0][2], 3)]
        turns += [(f[1], 'I look it up in the text.', f[2], 3) for f in ask[1:]]
        if self.p(0.1):
            turns.insert(0, (sep.join(text), None, self.pick(('I see.', 'All right.', 'Thank you, I will remember that.')), 1))
            turns[1] = (ask[0][1], 'I remember that from the text.', ask[0][2], 3)
        return turns

    def filler(self):
        x = self.r.random()
        if x < 0.5:
            return self.pick(self.pick(list(TOPICS.values())))
        return cap(self.pick(self.examples)).rstrip('.') + '.'

    # -- small tasks

    def small(self):
        x = self.n(0, 15)
        if x == 0:
            i = self.n(0, 6)
            if self.p(0.5): return [('What day comes after %s?' % DAYS[i], None, 'After %s comes %s.' % (DAYS[i], DAYS[(i + 1) % 7]), 2)]
            return [('What day comes before %s?' % DAYS[i], None, 'Before %s comes %s.' % (DAYS[i], DAYS[(i - 1) % 7]), 2)]
        if x == 1:
            i = self.n(0, 11)
            if self.p(0.5): return [('Which month comes after %s?' % MONTHS[i], None, 'After %s comes %s.' % (MONTHS[i], MONTHS[(i + 1) % 12]), 2)]
            return [('Which month comes before %s?' % MONTHS[i], None, 'Before %s comes %s.' % (MONTHS[i], MONTHS[(i - 1) % 12]), 2)]
        w = [self.pick(self.plain) if self.p(0.6) else self.pick(self.rare) for _ in range(self.n(2, 8))]
        L = ', '.join(w)
        if x == 2: return [('What is the first word of this list? %s' % L, None, 'The first word is %s.' % w[0], 3)]
        if x == 3: return [('What is the last word of this list? %s' % L, None, 'The last word is %s.' % w[-1], 3)]
        if x == 4: return [('How many words are in this list? %s' % L, 'I count: %s.' % ', '.join('%d %s' % (i + 1, v) for i, v in enumerate(w)), 'There are %d words in the list.' % len(w), 3)]
        if x == 5:
            i = self.n(0, len(w) - 1)
            return [('What is word number %d of this list? %s' % (i + 1, L), 'I count: %s.' % ', '.join('%d %s' % (j + 1, v) for j, v in enumerate(w[:i + 1])), 'Word number %d is %s.' % (i + 1, w[i]), 3)]
        if x == 6:
            v = w[self.n(0, len(w) - 1)] if self.p(0.5) else self.pick(self.plain)
            return [('Is the word "%s" in this list? %s' % (v, L), None, ('Yes, "%s" is in the list.' if v in w else 'No, "%s" is not in the list.') % v, 2)]
        if x == 7:
            a, b = self.n(0, 999), self.n(0, 999)
            return [(self.pick(('Which number is larger, %d or %d?', 'Which is more, %d or %d?')) % (a, b), None, '%d is larger than %d.' % (max(a, b), min(a, b)) if a != b else 'They are equal.', 2)]
        if x == 8:
            v = [self.n(0, 99) for _ in range(self.n(2, 8))]
            m = self.p(0.5)
            return [('What is the %s of these numbers? %s' % ('largest' if m else 'smallest', ', '.join(map(str, v))), None, 'The %s number is %d.' % ('largest' if m else 'smallest', (max if m else min)(v)), 3)]
        if x == 9:
            a = self.n(0, 999)
            return [('Is %d even or odd?' % a, None, '%d is %s.' % (a, 'odd' if a % 2 else 'even'), 2)]
        if x == 10:
            a, d = self.n(0, 40), self.n(1, 10)
            s = [a + d * i for i in range(6)]
            return [('Continue: %s' % ', '.join(map(str, s[:4])), 'The step is %d.' % d, ', '.join(map(str, s[4:])), 3)]
        if x == 11:
            g = self.pick(list(GROUPS))
            k = self.n(2, 6)
            return [(self.pick(('Name %s %s.', 'Give me %s %s.', 'List %s %s.')) % (NUMBER[k], g), None, join_and(self.some(GROUPS[g], k)).join(('', '.')), 1)]
        if x == 12:
            g, h = self.some(list(GROUPS), 2)
            odd = self.pick(GROUPS[h])
            s = self.some([y for y in GROUPS[g] if y not in GROUPS[h]], 3) + [odd]
            self.r.shuffle(s)
            return [('Which word does not belong? %s' % ', '.join(s), None, '%s does not belong, because it is not %s.' % (cap(odd), MEMBER[g]), 1)]
        if x == 13:
            g = self.pick(list(GROUPS))
            v = self.pick(GROUPS[g]) if self.p(0.5) else self.pick(TOOLS + ANIMALS + FURNITURE + INSTRUMENTS + CLOTHES)
            yes = v in GROUPS[g]
            return [('Is %s %s?' % (a_an(v) if v[0].islower() and g not in ('colours', 'foods') else v, MEMBER[g]), None, ('Yes, %s is %s.' if yes else 'No, %s is not %s.') % (a_an(v) if v[0].islower() and g not in ('colours', 'foods') else v, MEMBER[g]), 1)]
        if x == 14:
            u, v = self.some(NAMES, 2)
            adj, back = self.pick((('older', 'younger'), ('taller', 'shorter'), ('faster', 'slower'), ('stronger', 'weaker')))
            return [self.compare(u, v, adj, back)]
        i = self.n(0, 99)
        return [('What number comes %s %d?' % (('after', i) if i % 2 else ('before', i + 1)), None, '%d.' % (i + 1 if i % 2 else i), 2)]

    def compare(self, u, v, adj, back):
        if self.p(0.5):
            return ('%s is %s than %s. Who is %s?' % (u, adj, v, back), None, '%s is %s.' % (v, back), 2)
        return ('%s is %s than %s. Who is %s?' % (u, adj, v, adj), None, '%s is %s.' % (u, adj), 2)

    # -- words

    def definitions(self):
        """One sense of a word, the commonest; seven in ten of a few thousand common words, so that each is seen often."""
        turns = []
        for _ in range(self.pick((1, 1, 1, 2))):
            w = self.pick(self.common) if self.p(0.7) else self.pick(self.all_words)
            s = self.senses[w]
            q = self.pick(('What does "%s" mean?', 'What does "%s" mean?', 'Define "%s".', 'What is the meaning of "%s"?', 'Explain the word "%s".', 'What does the word %s mean?', 'Define %s.', 'Explain the word %s to me.')) % w
            part = {'noun': 'noun', 'verb': 'verb', 'adj': 'adjective', 'adv': 'adverb'}[s['part']]
            m = s['meaning']
            a = self.pick(('"%s" means: %s.', '"%s" means: %s.', '"%s" is ' + a_an(part) + '. It means: %s.')) % (cap(w), m)
            if s['part'] == 'noun' and re.match(r'(an?|the|any) ', m) and self.p(0.4):
                a = '%s is %s.' % (cap(a_an(w)), m)
            if s['example'] and self.p(0.4):
                a += ' For example: "%s"' % cap(s['example'])
            turns.append((q, '"%s" is %s.' % (w, a_an(part)), a, 1))
        return turns

    def knowledge(self):
        x = self.r.random()
        if x < 0.2:
            w = self.pick(self.opposites)
            return [(self.pick(('What is the opposite of "%s"?', 'What is the opposite of %s?')) % w, None, 'The opposite of "%s" is "%s".' % (w, self.senses[w]['opposite'][0]), 1)]
        w = self.pick(self.nouns)
        s = self.senses[w]
        if x < 0.4:
            return [(self.pick(('What kind of thing is %s?', 'What is %s?', 'What sort of thing is %s?')) % a_an(w), None, '%s is a kind of %s.' % (cap(a_an(w)), s['kind'][0]), 1)]
        if x < 0.5 and s['also']:
            return [('What is another word for "%s"?' % w, None, 'Another word for "%s" is "%s".' % (w, s['also'][0]), 1)]
        said = ['%s is a kind of %s.' % (cap(a_an(w)), s['kind'][0]) if self.p(0.6) else '%s is %s.' % (cap(w), s['meaning'])]
        if said[0].endswith(s['kind'][0] + '.'):
            said.append(self.pick(('It can be described as %s.', 'One may call it %s.', 'The dictionary says: %s.')) % s['meaning'])
        if s['kinds'] and self.p(0.8):
            k = self.some(s['kinds'], min(len(s['kinds']), self.n(1, 4)))
            said.append(self.pick(('There are several kinds, such as the %s.', 'Well known kinds are the %s.', 'Examples are the %s.')) % join_and(k) if len(k) > 1 else 'One kind is the %s.' % k[0])
        if s['parts']:
            said.append('It has parts such as the %s.' % join_and(s['parts']))
        if s['also'] and self.p(0.6):
            said.append('Another name for it is "%s".' % s['also'][0])
        if s['example']:
            said.append('One can say, for example: "%s"' % cap(s['example']))
        return [(self.pick(('Tell me something about the word "%s".', 'Tell me about "%s".', 'What do you know about "%s"?', 'Tell me what you know about the word %s.')) % w, None, ' '.join(said), 1)]

    # -- stories and open prose

    def story(self, hero=None, place=None):
        h = hero or self.pick(NAMES)
        k = self.pick(NAMES)
        while k == h or k[:2] == h[:2]:                                         # two names that a small model cannot mix up
            k = self.pick(NAMES)
        he = h in MALE
        p, q = self.some(PLACES, 2)
        p = place or p
        q = q if q != p else 'the old inn'
        slots = dict(h=h, k=k, he='he' if he else 'she', He='He' if he else 'She', his='his' if he else 'her', His='His' if he else 'Her', him='him' if he else 'her', kh='his' if k in MALE else 'her', p=p, q=q, o=self.pick(OBJECTS), f=self.pick(TREATS), a=a_an(self.pick(ANIMALS[:24])),
                     w=self.pick(WEATHER), d=self.pick(DAYS), i=self.pick(INSTRUMENTS), j=self.pick(JOBS), c='boy' if he else 'girl', c2=self.pick(COLOURS), cl=self.pick(('coat', 'hat', 'scarf', 'jacket')), fr=self.pick(FRUITS[:12]))
        slots['t'] = self.pick(HIS_THINGS).format(**slots)
        slots['r'] = self.pick(ROLES).format(**slots)
        plot = self.pick(PLOTS)
        intro = [self.pick(OPEN)] + self.some(DETAIL, self.n(1, 3))
        scenes = [self.pick(s) for s in plot]
        if self.p(0.5):
            scenes.insert(self.n(1, 3), self.pick(('"{say}" said {k}.', '"{say}" said {h}.')).replace('{say}', self.pick(('This will not be easy,', 'We must not give up,', 'I have never seen anything like it,', 'Let us try once more,', 'What would my mother say?', 'That is just what I thought,', 'Somebody has to do it,', 'Are you sure?'))))
        end = [self.pick(ENDING)] + ([self.pick(MORAL)] if self.p(0.4) else [])
        gap = self.pick((' ', ' ', '\n\n'))
        text = gap.join((' '.join(intro), ' '.join(scenes), ' '.join(end))).format(**slots)
        return dict(text=text, h=h, k=k, p=p)

    def stories(self):
        x = self.r.random()
        if x < 0.62:
            how = self.r.random()
            hero = self.pick(NAMES) if how < 0.45 else None
            place = self.pick(PLACES) if 0.45 <= how < 0.65 else None
            s = self.story(hero, place)
            if hero:
                q = self.pick(('Tell me a story about %s.', 'Write a story about %s.', 'Tell a short story about %s.', 'Can you tell me a story about someone called %s?')) % hero
            elif place:
                q = self.pick(('Tell me a story about %s.', 'Write a short story that takes place near %s.', 'Tell me a story that begins at %s.')) % place
            else:
                q = self.pick(('Tell me a story.', 'Please tell me a story.', 'Write a short story.', 'I would like to hear a story.', 'Tell me a story, please.', 'Make up a story.', 'Do you know a story?'))
            turns = [(q, 'I will tell a story about %s and %s.' % (s['h'], s['k']), s['text'], 1)]
            if self.p(0.25):
                turns.append(self.story_question(s))
            if self.p(0.1):
                turns.append((self.pick(('Tell me another one.', 'Another story, please.', 'One more story.')), None, self.story()['text'], 1))
            return turns
        s = self.story()
        if x < 0.85:
            q, t, a, w = self.story_question(s)
            turns = [(s['text'] + '\n\n' + q, t, a, w)]
            if self.p(0.5):
                turns.append(self.story_question(s))
            return turns
        cut = s['text'].find('. ', len(s['text']) // 4) + 1
        return [(self.pick(('Continue this story: %s', 'How does this story go on? %s', 'Finish this story.\n%s')) % s['text'][:cut].strip(), 'The story is about %s.' % s['h'], s['text'][cut:].strip(), 1)]

    def story_question(self, s):
        x = self.n(0, 2)
        if x == 0: return (self.pick(('Who is the story about?', 'What is the name of the main person?', 'Who is the main person in the story?')), None, 'The story is about %s.' % s['h'], 3)
        if x == 1: return (self.pick(('Who else is in the story?', 'Which other person is mentioned?', 'Who does %s meet in the story?' % s['h'])), None, '%s is in the story, too.' % s['k'], 3)
        return (self.pick(('Where does the story begin?', 'Which place is mentioned first?')), None, 'It begins near %s.' % s['p'], 3)

    def prose(self):
        x = self.r.random()
        if x < 0.6:
            t = self.pick(list(TOPICS))
            s = self.some(TOPICS[t], self.n(3, 8))
            if self.p(0.15):
                s.insert(1, self.pick(('That is easy to see.', 'Not everyone knows that.', 'Many people like that.', 'It has always been so.')))
            return [(self.pick(('Write a few sentences about %s.', 'Tell me something about %s.', 'Describe %s.', 'What can you say about %s?', 'Write a short text about %s.', 'Talk about %s.', 'What do you know about %s?')) % t, 'I will write about %s.' % t, ' '.join(s), 1)]
        if x < 0.75:
            t = self.pick(list(HOWTO))
            steps = HOWTO[t]
            a = ' '.join(steps) if self.p(0.5) else '\n'.join('%d. %s' % (i + 1, s) for i, s in enumerate(steps))
            return [(self.pick(('How do I %s?', 'How can I %s?', 'Tell me how to %s.', 'Explain how to %s.')) % t, None, a, 1)]
        u, v = self.some(NAMES, 2)
        rel = self.pick(('my friend', 'my aunt', 'my uncle', 'my teacher', 'my neighbour', 'my cousin', 'my grandmother', 'my brother', 'my sister'))
        body = self.some(['Thank you for your letter.', 'I hope that you are well.', 'Yesterday we went to %s, and it was wonderful.' % self.pick(PLACES), 'The weather is %s here.' % self.pick(('fine', 'cold', 'very warm', 'still rainy', 'mild')), 'My %s is growing fast and eats everything.' % self.pick(ANIMALS[:10]), 'I have learned to play the %s, at least a little.' % self.pick(INSTRUMENTS),
                          'Next %s I am going to %s.' % (self.pick(DAYS), self.pick(CITIES)), 'Do you remember the summer at %s?' % self.pick(PLACES), 'We have plenty of %ss this year, and I will bring you some.' % self.pick(FRUITS[:8]), 'I am reading a long book about %s.' % self.pick(list(TOPICS)), 'Please write to me soon.', 'Everybody here sends you greetings.'], self.n(3, 6))
        return [(self.pick(('Write a letter to %s %s.', 'Write a short letter to %s %s.', 'Help me write a letter to %s %s.')) % (rel, v), None, 'Dear %s,\n\n%s\n\n%s\n%s' % (v, ' '.join(body), self.pick(('Best wishes,', 'With love,', 'Yours,', 'Kind regards,')), u), 1)]

    def talk(self):
        turns = []
        for _ in range(self.pick((1, 1, 2, 3))):
            q, a = self.pick(TALK)
            turns.append((self.pick(q), None, self.pick(a), 1))
        return turns

    def quiz(self):
        r = self.pick(self.quiz_rows)
        if r[0] == 'capital':
            if self.p(0.25): return [('Which country has the capital %s?' % r[2], None, '%s is the capital of %s.' % (r[2], r[1]), 2)]
            return [(self.pick(('What is the capital of %s?', 'Which city is the capital of %s?')) % r[1], None, 'The capital of %s is %s.' % (r[1], r[2]), 2)]
        if r[0] == 'state': return [('What is the capital of the state %s?' % r[1], None, 'The capital of %s is %s.' % (r[1], r[2]), 2)]
        if r[0] == 'element':
            if self.p(0.5): return [('What is the chemical symbol of %s?' % r[1].lower(), None, 'The symbol of %s is %s.' % (r[1].lower(), r[2]), 2)]
            return [('Which element has the number %s?' % r[3], None, 'Element number %s is %s.' % (r[3], r[1].lower()), 2)]
        if r[0] == 'baby': return [('What is %s?' % a_an(r[1]), None, '%s is a young %s.' % (cap(a_an(r[1])), r[2]), 2)]
        return [('What does the flower "%s" stand for?' % r[1], None, 'It stands for "%s".' % r[2], 2)]

    def packages(self):
        name, summary = self.pick(self.held_packages)
        return [(self.pick(('What is the Debian package %s for?', 'What is %s?', 'What does the package %s contain?')) % name, None, '%s: %s.' % (name, summary.rstrip('.')), 1)]

    def persona(self):
        x = self.r.random()
        if x < 0.4:
            n = self.pick(NAMES)
            who = self.pick(PERSONA)
            turns = [(self.pick(('Who are you?', 'What is your name?', 'Introduce yourself.')), None, 'My name is %s. I am %s.' % (n, who), 2)]
            sys = self.pick(('You are %s, %s.', 'Your name is %s. You are %s.', 'You are called %s and you are %s.')) % (n, who)
            return dict(system=sys, turns=turns + (self.talk()[:1] if self.p(0.3) else []))
        used = set()
        fs = [self.fact(used) for _ in range(self.n(1, 4))]
        f = self.pick(fs)
        return dict(system=' '.join(g[0] for g in fs), turns=[(f[1], 'I look it up in the text above.', f[2], 3)])


if __name__ == '__main__':
    import json, os, random, sys
    facts = json.load(open(os.environ.get('TIDE_BUILD', os.path.join(os.path.dirname(os.path.abspath(__file__)), 'build')) + '/facts.json'))
    g = Tasks(random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1), facts)
    for _ in range(40):
        d = g.dialogue()
        print('---', d['kind'], '| system:', d['system'])
        for q, t, a, w in d['turns']:
            print('  Q:', q, '\n  T:', t, '\n  A:', a)
